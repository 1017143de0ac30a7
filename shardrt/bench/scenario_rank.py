"""One rank of a scenario of ``shardrt bench all``. Started by :mod:`shardrt.launch`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from shardrt.bench.link import DEVICE
from shardrt.bench.overlap import NO_LINK
from shardrt.bench.scenarios import ScenarioSettings
from shardrt.bench.shard import DEEPSPEED
from shardrt.bench.ways import Way
from shardrt.demo.rank import Report, run_rank

if TYPE_CHECKING:
    import torch

    from shardrt.bench.shard_ways import ShardTrainer


def work(told: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Measure all contestants in every round."""
    settings = ScenarioSettings(**told)
    if settings.contestants.keys() & DEEPSPEED.keys():  # read when it is imported
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(settings.ranks_per_host)}
    linked = settings.link != NO_LINK
    if linked:  # the hosts are one machine, whose name they share
        os.environ["SHARDRT_HOST"] = os.environ["GROUP_RANK"]

    from shardrt.bench.contest_rank import Wire, training
    from shardrt.bench.shard_ways import OurWay, make_ours, make_peer_trainer
    from shardrt.bench.whole_rounds import run_whole_rounds

    ours = {
        way.name: OurWay(
            strategy=way.strategy,
            schedule=way.schedule,
            backend=way.backend,
            bucket_mb=settings.bucket_mb,
            # With a link the hosts are the groups.
            shard_size=2 if way.level == "hybrid" and not linked else None,
        )
        for way in map(Way.parse, settings.ways)
        if way.is_ours
    }

    def make(name: str, model: torch.nn.Module, cleanup: ExitStack) -> ShardTrainer:
        if name in ours:
            return make_ours(ours[name], model, cleanup)
        return make_peer_trainer(name, model, settings, cleanup, bucket_mb=settings.bucket_mb)

    with training(settings, report) as shared:
        wire = Wire(device=DEVICE if linked else "lo", both_ways=linked)
        return run_whole_rounds(shared, make, wire, compute=True, may_refuse=True)


if __name__ == "__main__":
    run_rank(work)

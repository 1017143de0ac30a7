"""One rank of ``shardrt bench shard``. Started by :mod:`shardrt.launch`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from shardrt.bench.shard import DEEPSPEED, OURS, ShardSettings
from shardrt.demo.rank import Report, run_rank

if TYPE_CHECKING:
    import torch

    from shardrt.bench.shard_ways import ShardTrainer


def work(told: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Measure all contestants in every round."""
    settings = ShardSettings(**told)
    if settings.contestants.keys() & DEEPSPEED.keys():  # read when it is imported
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(settings.ranks)}

    from shardrt.bench.contest_rank import Wire, training
    from shardrt.bench.shard_ways import OurWay, make_ours, make_peer_trainer
    from shardrt.bench.whole_rounds import run_whole_rounds

    def make(name: str, model: torch.nn.Module, cleanup: ExitStack) -> ShardTrainer:
        if name in OURS:
            return make_ours(OurWay(strategy=name, schedule=settings.schedule), model, cleanup)
        return make_peer_trainer(name, model, settings, cleanup)

    with training(settings, report) as shared:
        return run_whole_rounds(shared, make, Wire(device="lo", both_ways=False))


if __name__ == "__main__":
    run_rank(work)

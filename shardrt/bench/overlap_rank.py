"""One rank of ``shardrt bench overlap``. Started by :mod:`shardrt.launch`."""

from __future__ import annotations

import functools
import gc
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardrt.bench.contest import PEERS, WARM_UP_STEPS
from shardrt.bench.link import DEVICE
from shardrt.bench.overlap import NO_LINK, RECORDED_STEPS, OverlapSettings
from shardrt.demo.rank import Report, run_rank

if TYPE_CHECKING:
    import torch

    from shardrt.bench.contest_rank import Trainer, Training


def work(told: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Measure all contestants, then record every schedule."""
    from shardrt.bench.contest_rank import Wire, run_rounds, training

    settings = OverlapSettings(**told["settings"])
    linked = settings.link != NO_LINK
    wire = Wire(device=DEVICE if linked else "lo", both_ways=linked)
    with training(settings, report) as shared:
        answer = run_rounds(shared, functools.partial(_make_trainer, settings, None), wire)
        for schedule in settings.schedules:
            _record(schedule, shared, settings, Path(told["timelines"]) / schedule)
            gc.collect()
    return answer


def _record(schedule: str, shared: Training, settings: OverlapSettings, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as cleanup:
        trainer = _make_trainer(settings, folder, schedule, shared.fresh_model(), cleanup)
        shared.train(schedule, trainer, range(WARM_UP_STEPS + RECORDED_STEPS))


def _make_trainer(
    settings: OverlapSettings, timeline: Path | None, name: str, model: torch.nn.Module, cleanup: ExitStack
) -> Trainer:
    import torch

    import shardrt
    from shardrt.bench.contest_rank import LR, Trainer, make_peer

    if name in PEERS:
        return make_peer(name, model)
    rt = cleanup.enter_context(
        shardrt.Runtime(
            partitioner=settings.partitioner,
            backend="gloo",
            schedule=name,
            bucket_mb=settings.bucket_mb,
            device="cpu",
            timeline=timeline,
        )
    )
    ours = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=LR)
    return Trainer(model=model, optimizer=ours, state_bytes=ours.state_bytes, settle=ours.finish)


if __name__ == "__main__":
    run_rank(work)

"""One rank of ``shardrt bench shard``. Started by :mod:`shardrt.launch`."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import attrs

from shardrt.bench.contest import DDP
from shardrt.bench.shard import DEEPSPEED, OURS, ShardSettings
from shardrt.demo.rank import Report, run_rank

if TYPE_CHECKING:
    import torch

    from shardrt.bench.contest_rank import Training, Wire
    from shardrt.bench.shard_ways import ShardTrainer

Values = Mapping[str, "torch.Tensor"]


def work(told: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Measure all contestants in every round."""
    settings = ShardSettings(**told)
    if settings.contestants.keys() & DEEPSPEED.keys():  # read when it is imported
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(settings.ranks)}

    import torch

    from shardrt.bench.contest_rank import Wire, training

    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in settings.contestants}
    wire = Wire(device="lo", both_ways=False)
    reference: Values | None = None
    used = ""
    with training(settings, report) as shared:
        _import_peers(settings)
        _warm_up(shared, settings)
        for number in range(settings.rounds):
            for name in settings.in_turn(number):
                run, values, schedule = _measure(name, shared, settings, wire)
                if reference is None:
                    assert name == DDP
                    reference = values
                used = schedule or used
                run |= {"largest_difference": _difference(values, reference), "digest": _digest(values, reference)}
                runs[name].append(run)
                del values
                gc.collect()  # so that two contestants are never in memory at once, but for the reference
    assert reference is not None
    return {
        "runs": runs,
        "schedule": used,
        "parameters": sum(value.numel() for value in reference.values()),
        "parameter_bytes": sum(value.nbytes for value in reference.values()),
        "torch": torch.__version__,
    }


def _import_peers(settings: ShardSettings) -> None:
    """Before any memory is measured: code that is loaded is nobody's need for memory."""

    if settings.contestants.keys() & DEEPSPEED.keys():
        import deepspeed  # type: ignore[import-not-found,unused-ignore]  # noqa: F401


def _warm_up(shared: Training, settings: ShardSettings) -> None:
    """Take a step that nobody counts: what kernels and connections need once is nobody's need for memory either."""
    from shardrt.bench.shard_ways import make_trainer

    with ExitStack() as cleanup:
        made = make_trainer(DDP, shared.fresh_model(), settings, cleanup)
        attrs.evolve(shared, tell=lambda name: None).train(DDP, made.trainer, range(1))


def _measure(
    name: str, shared: Training, settings: ShardSettings, wire: Wire
) -> tuple[dict[str, Any], dict[str, torch.Tensor], str]:
    from shardrt.bench.contest_rank import time_steps
    from shardrt.bench.memory import peak_memory
    from shardrt.bench.shard_ways import make_trainer

    with ExitStack() as cleanup:
        with peak_memory() as peak:
            # What it makes of the model is all that may keep it: peers put other parameters in place of the first ones.
            made: ShardTrainer = make_trainer(name, shared.fresh_model(), settings, cleanup)
            run = time_steps(name, shared, made.trainer, wire)
        values = made.whole()
        return {**run, "peak_bytes": peak.nbytes}, values, made.schedule if name in OURS else ""


def _difference(values: Values, reference: Values) -> float:
    """The largest between any two parameters of one name; not a number counts as infinite."""
    return max(
        (values[name] - theirs).abs().nan_to_num(nan=float("inf")).max().item() for name, theirs in reference.items()
    )


def _digest(values: Values, reference: Values) -> str:
    import hashlib

    digest = hashlib.sha256()
    for name in reference:
        digest.update(values[name].contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    run_rank(work)

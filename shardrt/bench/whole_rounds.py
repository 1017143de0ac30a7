"""The rounds of contests in which parameters may be sharded: what ``bench shard`` and ``bench all`` do on each rank.

Beside the times of :mod:`shardrt.bench.contest_rank` each run has the peak of memory, and whole parameters are put
together when its clock has stopped, to be compared with those of DDP + AdamW.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import attrs
import torch

from shardrt.bench.contest import DDP
from shardrt.bench.contest_rank import Trainer, Training, Wire, time_steps
from shardrt.bench.memory import peak_memory
from shardrt.bench.shard import DEEPSPEED
from shardrt.bench.shard_ways import ShardTrainer

COMPUTE = "compute"
"""The run in which nobody talks and nothing is updated: what forward and backward take."""

Values = Mapping[str, torch.Tensor]
MakeShardTrainer = Callable[[str, torch.nn.Module, ExitStack], ShardTrainer]


class Refused(Exception):
    """A contestant could not be built."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause

    @property
    def told(self) -> str:
        """The first line of the reason."""
        return f"{type(self.cause).__name__}: {str(self.cause).strip().partition(chr(10))[0]}"


def run_whole_rounds(
    shared: Training,
    make_trainer: MakeShardTrainer,
    wire: Wire,
    *,
    compute: bool = False,
    may_refuse: bool = False,
) -> dict[str, Any]:
    """Measure every contestant in every round; what a rank brings home.

    ``compute`` also measures :data:`COMPUTE`. With ``may_refuse`` a contestant that refuses to be built is left out
    and the reason told; that all ranks refuse alike is in the nature of a check, and a rank alone is missed by its
    peers within the patience of whoever launched them.
    """
    settings = shared.settings
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in settings.contestants}
    computing: list[list[float]] = []
    refused: dict[str, str] = {}
    reference: Values | None = None
    schedule = ""
    _import_peers(settings.contestants)
    _warm_up(shared, make_trainer)
    for number in range(settings.rounds):
        if compute:
            computing.append(_compute(shared, wire))
        for name in settings.in_turn(number):
            if name in refused:
                continue
            try:
                run, values, used = _measure(name, shared, make_trainer, wire)
            except Refused as error:
                if not may_refuse or name == DDP:
                    raise error.cause from None
                refused[name] = error.told
                continue
            if reference is None:
                assert name == DDP
                reference = values
            schedule = used or schedule
            run |= {"largest_difference": _difference(values, reference), "digest": _digest(values, reference)}
            runs[name].append(run)
            del values
            gc.collect()  # so that two contestants are never in memory at once, but for the reference
    assert reference is not None
    return {
        "runs": runs,
        "refused": refused,
        "compute": computing,
        "schedule": schedule,
        "parameters": sum(value.numel() for value in reference.values()),
        "parameter_bytes": sum(value.nbytes for value in reference.values()),
        "torch": torch.__version__,
    }


def _import_peers(names: Mapping[str, str]) -> None:
    """Before any memory is measured: code that is loaded is nobody's need for memory."""
    if names.keys() & DEEPSPEED.keys():
        import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401


def _warm_up(shared: Training, make_trainer: MakeShardTrainer) -> None:
    """Take a step that nobody counts: what kernels and connections need once is nobody's need for memory either."""
    with ExitStack() as cleanup:
        made = make_trainer(DDP, shared.fresh_model(), cleanup)
        attrs.evolve(shared, tell=lambda name: None).train(DDP, made.trainer, range(1))


def _measure(
    name: str, shared: Training, make_trainer: MakeShardTrainer, wire: Wire
) -> tuple[dict[str, Any], dict[str, torch.Tensor], str]:
    with ExitStack() as cleanup:
        with peak_memory() as peak:
            # What it makes of the model is all that may keep it: peers put other parameters in place of the first ones.
            try:
                made = make_trainer(name, shared.fresh_model(), cleanup)
            except Exception as error:
                raise Refused(error) from error
            run = time_steps(name, shared, made.trainer, wire)
        return {**run, "peak_bytes": peak.nbytes}, made.whole(), made.schedule


@attrs.frozen(eq=False)
class _OnlyForgets:
    """In place of an optimizer, where nothing is updated."""

    model: torch.nn.Module

    def step(self) -> None:
        pass

    def zero_grad(self) -> None:
        self.model.zero_grad()


def _compute(shared: Training, wire: Wire) -> list[float]:
    """Forward and backward, on all ranks at once, as everywhere else."""
    model = shared.fresh_model()
    trainer = Trainer(model=model, optimizer=_OnlyForgets(model), state_bytes=lambda: 0)
    seconds: list[float] = time_steps(COMPUTE, shared, trainer, wire)["step_seconds"]
    return seconds


def _difference(values: Values, reference: Values) -> float:
    """The largest between any two parameters of one name; not a number counts as infinite."""
    return max(
        (values[name] - theirs).abs().nan_to_num(nan=float("inf")).max().item() for name, theirs in reference.items()
    )


def _digest(values: Values, reference: Values) -> str:
    digest = hashlib.sha256()
    for name in reference:
        digest.update(values[name].contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]

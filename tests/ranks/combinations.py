"""Training with any combination of the things a loop may do, beside DDP with the plain optimizer."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import shardrt
from tests.ranks.twins import batch, largest_difference, twins

FEATURES = (
    "clipping",
    "GradScaler",
    "accumulation",
    "find_unused_parameters",
    "static_graph",
    "no_sync",
    "two optimizers",
)
SCHEDULES = ("sync", "bucket", "interleaved", "priority")
STEPS = 4
TOLERANCE = 2e-5
"""Of clipping and accumulation, where sums are formed in another order."""
_USES = {"clipping": "clipping", "GradScaler": "scaling", "accumulation": "accumulation"}


def all_combinations() -> list[tuple[str, ...]]:
    """Every subset of the features."""
    return [some for size in range(len(FEATURES) + 1) for some in itertools.combinations(FEATURES, size)]


def declared(features: Collection[str]) -> tuple[str, ...]:
    """What ``uses`` has to say of them."""
    # Accumulation inside no_sync is everybody's; only a second synchronised backward need be declared.
    return tuple(
        use
        for name, use in _USES.items()
        if name in features and not (name == "accumulation" and "no_sync" in features)
    )


class Net(torch.nn.Module):
    """Several layers, one of which all ranks, or rank 1 alone, leave out in some calls."""

    def __init__(self, *, skips: bool) -> None:
        super().__init__()
        self.inlet, self.middle, self.outlet = (torch.nn.Linear(*size) for size in ((7, 19), (19, 19), (19, 3)))
        self.sometimes = torch.nn.Linear(19, 19)
        self.skips = skips
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.tanh(self.middle(torch.tanh(self.inlet(x))))
        kind = self.calls % 3 if self.skips else 0
        if kind == 0 or (kind == 1 and torch.distributed.get_rank() == 0):
            x = torch.tanh(self.sometimes(x))
        return self.outlet(x)


def run_combination(schedule: str, features: Sequence[str], way: str = "ddp") -> dict[str, Any]:
    """How far a run is from its twin after some steps, or what was said when it was refused."""
    unused = "find_unused_parameters" in features
    # A static graph is the same in every iteration.
    ours, theirs = twins(lambda: Net(skips=unused and "static_graph" not in features))
    options = {"find_unused_parameters": unused, "static_graph": "static_graph" in features}
    warnings.filterwarnings("ignore", message="You passed find_unused_parameters=true")  # both at once is allowed
    plain = DistributedDataParallel(theirs, **options)
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.001, timeout=20) as rt:
        model: Any = DistributedDataParallel(ours, **options) if way == "ddp" else ours
        uses = declared(features)
        try:
            mine = _optimizers(lambda params, cls, **kw: rt.optimizer(params, cls, uses=uses, **kw), model, features)
        except shardrt.errors.UnsupportedError as error:
            return {"refused": str(error)}
        if way == "ddp":
            rt.attach(model, *mine, uses=uses)
        others = _optimizers(lambda params, cls, **kw: cls(params, **kw), plain, features)
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2)]
        skipped = 0
        for step in range(STEPS):
            for index, (each, optimizers) in enumerate(((model, mine), (plain, others))):
                _backwards(rt, each, optimizers[0] if each is ours else None, step, features, scalers[index])
                skipped += _update(rt, each, optimizers, features, scalers[index], sharded=each is model)
        scales = [scaler.get_scale() for scaler in scalers]
        assert scales[0] == scales[1], scales
    return {"difference": largest_difference(ours.parameters(), theirs.parameters()), "skipped": skipped // 2}


def _optimizers(make: Any, model: torch.nn.Module, features: Collection[str]) -> list[Any]:
    params = list(model.named_parameters())
    if "two optimizers" not in features:
        return [make(params, torch.optim.AdamW, lr=1e-2)]
    return [
        make(params[::2], torch.optim.AdamW, lr=1e-2),
        make(params[1::2], torch.optim.SGD, lr=1e-2, momentum=0.9),
    ]


def _backwards(
    rt: shardrt.Runtime, model: Any, opt: Any, step: int, features: Collection[str], scaler: torch.amp.GradScaler
) -> None:
    parts = 2 if {"accumulation", "no_sync"} & set(features) else 1
    if {"static_graph", "no_sync"} <= set(features) and step == 0:
        parts = 1  # see below
    for part in range(parts):
        waiting: Any = contextlib.nullcontext()
        # A static graph is learned in the first iteration, which DDP wants to be a synchronised one.
        learning = "static_graph" in features and step == 0
        if "no_sync" in features and part == 0 and not learning:
            waiting = model.no_sync() if isinstance(model, DistributedDataParallel) else rt.no_sync(model)
        with waiting:
            loss = model(batch(step * parts + part, rt.rank)).pow(2).mean() / parts
            if "GradScaler" in features:
                if step == 1 and rt.rank == 1:
                    loss = loss * float("inf")
                loss = scaler.scale(loss)
            loss.backward()


def _update(
    rt: shardrt.Runtime, model: Any, optimizers: list[Any], features: Collection[str], scaler: Any, *, sharded: bool
) -> int:
    before = scaler.get_scale()
    scaling = "GradScaler" in features
    if "clipping" in features:
        for optimizer in optimizers if scaling else ():
            scaler.unscale_(optimizer)
        if sharded:
            rt.clip_grad_norm_(model, 0.05)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    for optimizer in optimizers:
        if scaling:
            scaler.step(optimizer)
        else:
            optimizer.step()
    if scaling:
        scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()
    return int(scaler.get_scale() < before)

"""What a step costs on one rank, where shardrt has nothing to do: through it, beside the bare optimizer.

Two copies of the same parameters with the same constant gradients, one stepped by the plain torch optimizer and one by
what ``rt.optimizer`` returns. Each round times both, turns about in who goes first, so that drifts of the machine meet
both; the ratio is the median of the rounds' own ratios. One thread, garbage collector paused while a clock runs.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import attrs
import torch

import shardrt
from shardrt.errors import ConfigError

_WIDTH = 256
_LAYERS = 4


def _transformer() -> list[tuple[int, ...]]:
    layer: list[tuple[int, ...]] = [
        *((_WIDTH,), (_WIDTH,), (3 * _WIDTH, _WIDTH), (3 * _WIDTH,), (_WIDTH, _WIDTH), (_WIDTH,)),
        *((_WIDTH,), (_WIDTH,), (4 * _WIDTH, _WIDTH), (4 * _WIDTH,), (_WIDTH, 4 * _WIDTH), (_WIDTH,)),
    ]
    return [(256, _WIDTH), (128, _WIDTH), *(layer * _LAYERS), (_WIDTH,), (_WIDTH,)]


MODELS: Mapping[str, list[tuple[int, ...]]] = MappingProxyType(
    {"transformer": _transformer(), "many small": [(32,)] * 1000}
)
"""Name to the shapes of the parameters."""

OPTIMIZERS: Mapping[str, tuple[type[torch.optim.Optimizer], Mapping[str, Any]]] = MappingProxyType(
    {
        "AdamW foreach": (torch.optim.AdamW, {"lr": 1e-3, "foreach": True}),
        "SGD momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    }
)


@attrs.frozen(kw_only=True)
class StepTime:
    """One model with one optimizer: medians over the rounds."""

    model: str
    optimizer: str
    params: int
    elements: int
    bare_seconds: float
    shardrt_seconds: float
    ratio: float
    """The median of the rounds' ratios, which a busy machine disturbs less than the ratio of the medians."""

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return attrs.asdict(self)


@attrs.frozen(kw_only=True)
class StepReport:
    """The times of all cases."""

    rounds: int
    times: tuple[StepTime, ...]

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {
            "torch": torch.__version__,
            "threads": 1,
            "rounds": self.rounds,
            "largest_ratio": max(row.ratio for row in self.times),
            "times": [row.to_json() for row in self.times],
        }


def measure_steps(*, rounds: int = 30, seconds_per_round: float = 0.02) -> StepReport:
    """Time a step of every case; each round repeats the step for about ``seconds_per_round``.

    Example:
        >>> from shardrt.bench.step import measure_steps
        >>> report = measure_steps(rounds=1, seconds_per_round=0.001)
        >>> len(report.times), all(row.ratio > 0 for row in report.times)
        (4, True)
    """
    if rounds < 1:
        raise ConfigError(f"rounds must be 1 or more, got {rounds}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"this benchmark is for one rank, but WORLD_SIZE={os.environ['WORLD_SIZE']} is set; "
            "run it without a launcher, or unset WORLD_SIZE"
        )
    with _one_thread(), shardrt.Runtime(device="cpu") as rt:
        rows = [
            _measure(rt, model, optimizer, rounds, seconds_per_round) for model in MODELS for optimizer in OPTIMIZERS
        ]
    return StepReport(rounds=rounds, times=tuple(rows))


def _measure(rt: shardrt.Runtime, model: str, optimizer: str, rounds: int, seconds_per_round: float) -> StepTime:
    shapes = MODELS[model]
    optimizer_class, options = OPTIMIZERS[optimizer]
    bare = optimizer_class(_params(shapes), **options)
    ours = rt.optimizer(_params(shapes), optimizer_class, **options)
    repeats = max(1, round(seconds_per_round / min(_time(bare.step, 1) for _ in range(3))))
    _time(ours.step, 3)
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    contestants: list[tuple[str, Callable[[], object]]] = [("bare", bare.step), ("ours", ours.step)]
    for _ in range(rounds):
        for name, step in contestants:
            times[name].append(_time(step, repeats))
        contestants.reverse()
    return StepTime(
        model=model,
        optimizer=optimizer,
        params=len(shapes),
        elements=sum(torch.Size(shape).numel() for shape in shapes),
        bare_seconds=statistics.median(times["bare"]),
        shardrt_seconds=statistics.median(times["ours"]),
        ratio=statistics.median(mine / other for mine, other in zip(times["ours"], times["bare"], strict=True)),
    )


def _params(shapes: list[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in shapes:
        param = torch.nn.Parameter(torch.randn(shape, generator=generator))
        param.grad = torch.randn(shape, generator=generator)
        made.append(param)
    return made


def _time(step: Callable[[], object], repeats: int) -> float:
    """Seconds of one step, the mean of ``repeats``."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        started = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - started) / repeats
    finally:
        if collecting:
            gc.enable()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

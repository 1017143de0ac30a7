"""How cost grows with parameters, ranks and buckets: planning, runtime, handshake, optimizer, step, checkpoint.

Everything is measured on tensors of a few elements, so that what is left is what shardrt itself does. Planning and
digests run in this process; the rest on real ranks over Gloo, see :mod:`shardrt.bench.growth_rank`. How times become
verdicts: see :mod:`shardrt.bench.growth_fit`.

Note [Ranks that share processors]: sixty-four ranks on two cores wait for one another's turn, so the time on the clock
is the work of all of them together, not what a rank would need on a core of its own. Along ranks a cost is therefore
judged by the processor time of the busiest rank: the first one in all that goes through the group's store. Its
growth says how a job on as many machines would grow. The clock's is told beside it.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from shardrt.bench.growth_fit import Curve
from shardrt.bench.interrupts import terminating_in_order
from shardrt.errors import ConfigError
from shardrt.handshake import Field, digest
from shardrt.launch import OnEvent, launch_ranks

AXES = ("parameters", "ranks", "buckets")
PLANNED_RANKS = 64
"""Ranks that parameters are planned for."""
_PARAMS = {"parameters": 0, "ranks": 100, "buckets": 1000}
"""How many parameters there are where these are not the axis."""
_NUMEL = {"parameters": 8, "ranks": 8, "buckets": 256}
_BY_NATURE: Mapping[str, str] = {
    "store bytes, values different": "n ranks each get n values",
    "torch's process group": "torch's own",
}
"""What may grow faster, and why."""


@attrs.frozen(kw_only=True)
class GrowthCase:
    """One size along one axis, as ranks are told of it."""

    axis: str
    size: int
    backend: str = "gloo"

    @property
    def ranks(self) -> int:
        """How many take part."""
        return self.size if self.axis == "ranks" else 2

    @property
    def params(self) -> int:
        """How many parameters the model has."""
        return self.size if self.axis == "parameters" else _PARAMS[self.axis]

    @property
    def numel(self) -> int:
        """Elements of each."""
        return _NUMEL[self.axis]

    @property
    def buckets(self) -> int:
        """How many buckets they are in."""
        return self.size if self.axis == "buckets" else 1

    @property
    def described(self) -> str:
        """For people."""
        return f"{self.size:,} {self.axis}"

    def options(self, timeout: float) -> dict[str, Any]:
        """What the runtime is told."""
        if self.axis != "buckets":
            return {"timeout": timeout}
        # Whole parameters fill a bucket to the last byte, so that there are just as many as asked for.
        return {
            "timeout": timeout,
            "partitioner": "bucket",
            "bucket_mb": 4 * self.params * self.numel / self.size / 2**20,
        }


@attrs.frozen(kw_only=True)
class GrowthSettings:
    """What to measure.

    Example:
        >>> from shardrt.bench.growth import GrowthSettings
        >>> GrowthSettings(ranks=(2, 4), axes=("ranks",)).cases[-1].described
        '4 ranks'
        >>> GrowthSettings(buckets=(1, 7))
        Traceback (most recent call last):
        shardrt.errors.ConfigError: 1000 parameters do not fill 7 buckets alike; give divisors of 1000
    """

    axes: tuple[str, ...] = AXES
    params: tuple[int, ...] = (100, 1_000, 10_000, 100_000)
    ranks: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    buckets: tuple[int, ...] = (1, 10, 100, 1_000)
    rounds: int = 3
    trained_params: int = 10_000
    """Planning goes up to all of ``params``; optimizers are built, stepped and saved with so many at most."""

    def __attrs_post_init__(self) -> None:
        for axis in self.axes:
            if axis not in AXES:
                raise ConfigError(f"there is no axis {axis!r}; choose among {', '.join(AXES)}")
            sizes = self.sizes(axis)
            if (
                not sizes
                or any(type(size) is not int or size < 1 for size in sizes)
                or list(sizes) != sorted(set(sizes))
            ):
                raise ConfigError(f"sizes along {axis} must be whole numbers from 1 up, growing; got {list(sizes)}")
        if type(self.rounds) is not int or self.rounds < 1:
            raise ConfigError(f"rounds must be a whole number from 1 up, got {self.rounds!r}")
        for size in self.buckets:
            if _PARAMS["buckets"] % size:
                raise ConfigError(
                    f"{_PARAMS['buckets']} parameters do not fill {size} buckets alike; give divisors of "
                    f"{_PARAMS['buckets']}"
                )

    def sizes(self, axis: str) -> tuple[int, ...]:
        """Along one axis."""
        return {"parameters": self.params, "ranks": self.ranks, "buckets": self.buckets}[axis]

    @property
    def cases(self) -> list[GrowthCase]:
        """What ranks measure, in one round."""
        found = [GrowthCase(axis=axis, size=size) for axis in self.axes for size in self.sizes(axis)]
        return [case for case in found if case.params <= self.trained_params or case.axis != "parameters"]

    @property
    def turns(self) -> int:
        """How many measurements are reported."""
        return self.rounds * len(self.cases)

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {
            "axes": list(self.axes),
            "sizes": {axis: list(self.sizes(axis)) for axis in self.axes},
            "rounds": self.rounds,
            "trained_params": self.trained_params,
        }


@attrs.frozen(kw_only=True)
class GrowthReport:
    """All curves, by axis."""

    settings: GrowthSettings
    curves: tuple[Curve, ...]
    seconds: float

    @property
    def all_within(self) -> bool:
        """Whether nothing grows faster than n log n, but for what does so by nature."""
        return all(curve.within is not False or curve.by_nature for curve in self.curves)

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {
            **self.settings.to_json(),
            "curves": [curve.to_json() for curve in self.curves],
            "all_within": self.all_within,
            "total_seconds": self.seconds,
        }


def measure_growth(
    settings: GrowthSettings, *, on_event: OnEvent | None = None, patience: float = 600.0
) -> GrowthReport:
    """Measure all cases. An event names the ``case`` and counts those ``done`` out of ``settings.turns``."""
    started = time.monotonic()
    curves: list[Curve] = []
    if "parameters" in settings.axes:
        curves += _measure_here(settings)
    cases = settings.cases * settings.rounds
    if not cases:
        raise ConfigError(
            f"no size along parameters is at most trained_params={settings.trained_params}; give a smaller one"
        )
    with terminating_in_order(), tempfile.TemporaryDirectory(prefix="shardrt-growth-") as folder:
        answers = launch_ranks(
            "shardrt.bench.growth_rank",
            {"cases": [attrs.asdict(case) for case in cases], "directory": folder, "patience": patience},
            ranks=max(case.ranks for case in cases),
            on_event=on_event,
            patience=patience,
        )
    for axis in settings.axes:
        curves += _curves(axis, cases, answers)
    order = {axis: number for number, axis in enumerate(settings.axes)}
    return GrowthReport(
        settings=settings,
        curves=tuple(sorted(curves, key=lambda curve: order[curve.axis])),
        seconds=time.monotonic() - started,
    )


def _curves(axis: str, cases: Sequence[GrowthCase], answers: Sequence[Sequence[Any]]) -> list[Curve]:
    """From what every rank measured in every case to one curve for each thing that was measured."""
    best: dict[str, dict[int, dict[str, float]]] = {}
    for number, case in enumerate(cases):
        if case.axis != axis:
            continue
        found = [answer[number] for answer in answers if answer[number] is not None]
        for what in dict.fromkeys(name for one in found for name in one):
            measured = [one[what] for one in found if what in one]
            kept = best.setdefault(what, {}).setdefault(case.size, {})
            for key in measured[0]:
                together = sum if key == "count" else max
                value = together(one[key] for one in measured)
                kept[key] = min(value, kept.get(key, value))
    return [_curve(axis, what, by_size) for what, by_size in best.items() if _told(axis, what)]


def _told(axis: str, what: str) -> bool:
    """What does not depend on an axis is not told along it."""
    on_the_way = what in ("Runtime", "meeting", "torch's process group") or what.startswith(("store", "exchange"))
    return axis == "ranks" or not on_the_way


def _curve(axis: str, what: str, by_size: Mapping[int, Mapping[str, float]]) -> Curve:
    counted = all("count" in value for value in by_size.values())
    return Curve(
        axis=axis,
        what=what,
        sizes=tuple(by_size),
        seconds=tuple(value["count" if counted else "seconds"] for value in by_size.values()),
        cpu=None if counted else tuple(value["cpu"] for value in by_size.values()),
        judged_by="counted" if counted else "cpu" if axis == "ranks" else "seconds",
        by_nature=_BY_NATURE.get(what, ""),
    )


def _measure_here(settings: GrowthSettings) -> list[Curve]:
    """What needs no other rank: planning, the plan's fingerprint, and the digests of a handshake."""
    from shardrt.bench.planning import transformer_params
    from shardrt.optim.agreement import parameter_fields
    from shardrt.plan import Plan
    from shardrt.protocols import PartitionRequest
    from shardrt.registry import load_registry

    partitioners = {entry.record.name: entry.record.factory() for entry in load_registry().partitioners}
    best: dict[str, dict[int, float]] = {}

    def measure(what: str, size: int, run: Callable[[], Any]) -> Any:
        gc.collect()
        gc.disable()  # as in timeit: whose turn it is to be collected is chance
        started = time.perf_counter()
        answer = run()
        took = time.perf_counter() - started
        gc.enable()
        kept = best.setdefault(what, {})
        kept[size] = min(took, kept.get(size, float("inf")))
        return answer

    for size in settings.params:
        specs = transformer_params(size)
        request = PartitionRequest(params=specs, world_size=PLANNED_RANKS)
        for _ in range(settings.rounds):
            for name, partitioner in partitioners.items():
                partition = measure(f"planning, {name}", size, partial(partitioner.partition, request))
                if name == "greedy":
                    build = partial(Plan.build, specs, partition, partitioner=name)
                    measure("plan and fingerprint", size, lambda build=build: build().fingerprint)  # type: ignore[misc]
            fields = parameter_fields(specs).values()
            measure("digests of a handshake", size, partial(_digests, fields))
    return [
        Curve(axis="parameters", what=what, sizes=tuple(by_size), seconds=tuple(by_size.values()))
        for what, by_size in best.items()
    ]


def _digests(fields: Iterable[Field]) -> list[str]:
    return [digest(field.value) for field in fields]

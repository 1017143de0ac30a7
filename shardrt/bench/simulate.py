"""A training step on thousands of ranks, simulated from collectives that were measured here.

1. Collectives of a backend are measured on a few real ranks, and a cost model is fitted to them
   (:mod:`shardrt.bench.simulate_model`); or the model of an earlier run is read.
2. The step is simulated for as many ranks as wanted, rank by rank (:mod:`shardrt.bench.simulate_events`), over the
   buckets that shardrt would make of a model, under every schedule and fully sharded, with each algorithm.
3. Beside each stands the formula it should follow (:mod:`shardrt.bench.simulate_formulas`); and for the few real ranks
   the step that was measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from shardrt.bench.shapes import SIZES
from shardrt.bench.simulate_events import FULL_SHARD, SCHEDULES, StepWork, collective, simulate_step
from shardrt.bench.simulate_formulas import EXACT, slowest_delay, step_formula
from shardrt.bench.simulate_measuring import KINDS, Measured, SimulateSettings, measure
from shardrt.bench.simulate_model import ALGORITHMS
from shardrt.launch import OnEvent

Sizes = Mapping[str, Sequence[float]]
"""Bytes of buckets, or of units, for each kind."""
_STEPS = 9


@attrs.frozen(kw_only=True)
class Simulated:
    """One simulated step beside its formula, or a real one beside the simulated."""

    ranks: int
    algorithm: str
    kind: str
    seconds: float
    formula: float
    delayed: float
    """With delays, and what the formula says then."""
    delayed_formula: float

    @property
    def exact(self) -> bool:
        """Whether the formula is met, and not only a bound from below."""
        return self.kind in EXACT

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {
            **attrs.asdict(self),
            "exact": self.exact,
            "times_formula": self.seconds / self.formula,
            "delayed_times_formula": self.delayed / self.delayed_formula,
        }


@attrs.frozen(kw_only=True)
class Checked:
    """A real step beside the simulated one, which overlaps fully or not at all."""

    ranks: int
    kind: str
    measured: float
    overlapped: float
    in_turn: float

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {**attrs.asdict(self), "measured_times_in_turn": self.measured / self.in_turn}


@attrs.frozen(kw_only=True)
class SimulateReport:
    """Everything."""

    settings: SimulateSettings
    measured: Measured
    steps: tuple[Simulated, ...]
    checks: tuple[Checked, ...]
    buckets: int
    model_bytes: int
    seconds: float
    simulating_seconds: float

    @property
    def follows(self) -> bool:
        """Whether every step without delays meets its formula within 1 %, or is not below a bound."""
        return all(
            abs(step.seconds / step.formula - 1) < 0.01 if step.exact else step.seconds > 0.99 * step.formula
            for step in self.steps
        )

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {
            **self.settings.to_json(),
            "measured": self.measured.to_json(),
            "buckets": self.buckets,
            "model_bytes": self.model_bytes,
            "steps": [step.to_json() for step in self.steps],
            "checks": [check.to_json() for check in self.checks],
            "follows": self.follows,
            "simulating_seconds": self.simulating_seconds,
            "total_seconds": self.seconds,
        }


def measure_simulation(
    settings: SimulateSettings,
    *,
    measured: Measured | None = None,
    on_event: OnEvent | None = None,
    patience: float = 300.0,
) -> SimulateReport:
    """Measure, unless that was done before; then simulate. An event tells ``what`` is measured, and counts ``done``."""
    started = time.monotonic()
    measured = measured or measure(settings, on_event, patience)
    sizes = _sizes(settings)
    began = time.monotonic()
    steps = tuple(
        _simulate(settings, measured, sizes, ranks, algorithm, kind)
        for ranks in settings.ranks
        for algorithm in ALGORITHMS
        for kind in KINDS
    )
    checks = tuple(_check(measured, sizes, world, kind) for world in measured.checks for kind in KINDS)
    ended = time.monotonic()
    return SimulateReport(
        settings=settings,
        measured=measured,
        steps=steps,
        checks=checks,
        buckets=len(sizes["bucket"]),
        model_bytes=int(sum(sizes["bucket"])),
        seconds=ended - started,
        simulating_seconds=ended - began,
    )


def _work(kind: str, sizes: Sizes, ranks: int, computation: Mapping[str, float]) -> StepWork:
    """Each rank updates its share."""
    shared = {**computation, "update": computation["update"] / ranks}
    return StepWork.share_out(sizes[kind], **shared)


def _simulate(
    settings: SimulateSettings, measured: Measured, sizes: Sizes, ranks: int, algorithm: str, kind: str
) -> Simulated:
    model = measured.model
    work = _work(kind, sizes, ranks, measured.computation)
    run = collective(model, algorithm)
    formula = step_formula(kind, work, lambda n, reduces: model.formula(algorithm, ranks, n, reduces=reduces))
    mean = settings.straggle * (sum(work.forward) + sum(work.backward))
    delays = np.random.default_rng(settings.seed).exponential(mean, (_STEPS, ranks)) if mean else np.zeros((3, ranks))
    return Simulated(
        ranks=ranks,
        algorithm=algorithm,
        kind=kind,
        seconds=simulate_step(kind, work, run, np.zeros((3, ranks))),
        formula=formula,
        delayed=simulate_step(kind, work, run, delays),
        delayed_formula=formula + slowest_delay(mean, ranks),
    )


def _check(measured: Measured, sizes: Sizes, world: Mapping[str, Any], kind: str) -> Checked:
    ranks = world["ranks"]
    run = collective(measured.model.shared(world["sharing"]), "direct")
    work = _work(kind, sizes, ranks, world["computation"])
    return Checked(
        ranks=ranks,
        kind=kind,
        measured=world["steps"][kind],
        overlapped=simulate_step(kind, work, run, np.zeros((3, ranks))),
        in_turn=simulate_step(kind, work, run, np.zeros((3, ranks)), one_clock=True),
    )


def _sizes(settings: SimulateSettings) -> Sizes:
    """The buckets and units that shardrt makes of the model, in the order in which backward fills them."""
    from shardrt.demo.model import ByteTransformer
    from shardrt.plan import ParamSpec, group_for_travel
    from shardrt.sharding.units import find_units

    size = SIZES[settings.size]
    model = ByteTransformer(width=size.width, layers=size.layers, heads=size.heads, context=size.context)
    specs = [
        ParamSpec(name=name, shape=tuple(param.shape), dtype="float32") for name, param in model.named_parameters()
    ]
    groups = group_for_travel(specs, settings.bucket_bytes)
    buckets = [float(sum(spec.nbytes for spec in group)) for group in groups]
    nbytes = {spec.name: spec.nbytes for spec in specs}
    root, *others = [float(sum(nbytes[name] for name in unit.params)) for unit in find_units(model)]
    found = dict.fromkeys(SCHEDULES, buckets)
    return {**found, "sync": [sum(buckets)], FULL_SHARD: [*reversed(others), root]}


__all__ = ["KINDS", "Checked", "Measured", "SimulateReport", "SimulateSettings", "Simulated", "measure_simulation"]

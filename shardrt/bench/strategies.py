"""What each strategy of ``rt.shard`` holds and moves, beside what theory says. No time is measured.

For each number of ranks a group is started once. In it an unsharded model is trained first, by every rank for itself:
what its forward leaves in memory are the activations. Then each strategy trains the same model: two steps to warm up,
then steps that are counted. Memory is what torch's allocator hands out (see Note [Telling of allocations]); traffic is
the payload that our communicators count, and beside it what the network device counted in the quietest step.

Note [What theory says]: AdamW in float32 keeps 4 bytes of parameter, 4 of gradient and 8 of state for each element of
the model. A strategy divides some of these by the number of ranks that share them; at the peak of a step activations
come on top. A step sends 2 (N - 1) / N of the parameters' bytes per rank, on average: an all-reduce, or a
reduce-scatter and an all-gather. Where parameters are sharded they are gathered twice, which makes it 3 (N - 1) / N,
except for the root unit, which stays from forward to backward. Hybrid strategies do this inside a group of n ranks, and
average the 1 / n that each rank has with its r replicas: another 2 (r - 1) / r of it. Between two hosts with one group
each, only the latter travels; without groups half of the N ranks are on the other host, to which N / 2 / (N - 1) of all
bytes go.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import attrs

from shardrt.bench.link import EmulatedLink, bits_per_second
from shardrt.bench.overlap import NO_LINK
from shardrt.bench.shapes import SIZES
from shardrt.errors import ConfigError
from shardrt.launch import OnEvent, launch_ranks
from shardrt.registry import load_registry
from shardrt.registry.nearness import did_you_mean

UNSHARDED = "unsharded"
"""The twin: one rank for itself, with the plain optimizer."""
SHARD_SIZE = 2
"""Ranks that share under the hybrid strategies."""
TOKENS = 8
"""Per rank and step: so few that activations hardly matter."""
MEMORY_TOLERANCE = 0.05
"""Of the formula; and one unit on top."""
TRAFFIC_TOLERANCE = 0.01


@attrs.frozen(kw_only=True)
class Divided:
    """What a strategy divides among ranks."""

    params: bool = False
    gradients: bool = False
    state: bool = True
    hybrid: bool = False


STRATEGIES: Mapping[str, Divided] = MappingProxyType(
    {
        "no_shard": Divided(state=False),
        "shard_optim": Divided(),
        "shard_grad_op": Divided(gradients=True),
        "full_shard": Divided(gradients=True, params=True),
        "hybrid_shard": Divided(gradients=True, params=True, hybrid=True),
        "hybrid_shard_zero2": Divided(gradients=True, hybrid=True),
    }
)


PREFETCHES = ("pre", "post", "none")


def _tuple(given: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(given)  # they travel to the ranks as a list


@attrs.frozen(kw_only=True)
class StrategiesSettings:
    """What to count.

    Example:
        >>> from shardrt.bench.strategies import StrategiesSettings
        >>> settings = StrategiesSettings(strategies=["full_shard", "hybrid_shard"])
        >>> settings.taking_part(2), settings.taking_part(4)
        (('full_shard',), ('full_shard', 'hybrid_shard'))
        >>> StrategiesSettings(ranks=(1,))
        Traceback (most recent call last):
        shardrt.errors.ConfigError: ranks must be whole numbers from 2 up, got 1: alone there is nothing to shard
    """

    ranks: tuple[int, ...] = attrs.field(default=(2, 4), converter=_tuple)
    steps: int = 3
    size: str = "small"
    strategies: tuple[str, ...] = attrs.field(default=tuple(STRATEGIES), converter=_tuple)
    schedule: str | None = None
    """None is the runtime's default."""
    partitioner: str | None = None
    prefetch: str = "pre"
    """Which unit is asked for ahead in backward, see :class:`shardrt.sharding.prefetching.Prefetch`; ``none``: nothing
    ever is."""
    divide_units: bool = False
    """Whether large units are gathered layer by layer."""
    link: str = NO_LINK
    """A rate: the ranks are on two hosts with this between them."""

    def __attrs_post_init__(self) -> None:
        for ranks in self.ranks:
            if type(ranks) is not int or ranks < 2:
                raise ConfigError(
                    f"ranks must be whole numbers from 2 up, got {ranks!r}: alone there is nothing to shard"
                )
        if not self.ranks:
            raise ConfigError("no number of ranks was given; give one or several, such as 2 and 4")
        if type(self.steps) is not int or self.steps < 1:
            raise ConfigError(f"steps must be a whole number from 1 up, got {self.steps!r}")
        if self.size not in SIZES:
            raise ConfigError(f"unknown size {self.size!r}; sizes: {', '.join(SIZES)}{did_you_mean(self.size, SIZES)}")
        for name in self.strategies:
            if name not in STRATEGIES:
                raise ConfigError(
                    f"unknown strategy {name!r}; there are: {', '.join(STRATEGIES)}{did_you_mean(name, STRATEGIES)}"
                )
        if self.prefetch not in PREFETCHES:
            raise ConfigError(f"unknown prefetch {self.prefetch!r}; there are: {', '.join(PREFETCHES)}")
        if not any(self.taking_part(ranks) for ranks in self.ranks):
            raise ConfigError(
                f"{' and '.join(self.strategies) or 'no strategy'} with {' and '.join(map(str, self.ranks))} ranks "
                f"leaves nothing to count: hybrid strategies take an even number of ranks from {2 * SHARD_SIZE} up"
            )
        if self.link != NO_LINK:
            bits_per_second(self.link)
            if self.ranks != (2 * SHARD_SIZE,):
                raise ConfigError(
                    f"a link joins 2 hosts with {SHARD_SIZE} ranks each, got {' and '.join(map(str, self.ranks))} "
                    f"ranks; use {2 * SHARD_SIZE}, or link={NO_LINK!r}"
                )
        # Before ranks are started, which would each find out for themselves.
        registry = load_registry()
        if self.schedule is not None:
            registry.schedules.get(self.schedule)
        if self.partitioner is not None:
            registry.partitioners.get(self.partitioner)

    def taking_part(self, ranks: int) -> tuple[str, ...]:
        """The strategies that this many ranks can have; the hybrid ones need several groups."""
        grouped = ranks % SHARD_SIZE == 0 and ranks >= 2 * SHARD_SIZE
        return tuple(name for name in self.strategies if grouped or not STRATEGIES[name].hybrid)

    @property
    def all_runs(self) -> int:
        """How many trainings there are, with those of the twins."""
        return sum(1 + len(self.taking_part(ranks)) for ranks in self.ranks)

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return attrs.asdict(self)


@attrs.frozen(kw_only=True)
class Theory:
    """What the formulas say of one strategy. See Note [What theory says].

    Example:
        >>> from shardrt.bench.strategies import Theory
        >>> full = Theory.of("full_shard", ranks=4, parameter_bytes=4000, root_bytes=400)
        >>> full.held, full.sent, full.sent_roughly
        (4000.0, 8700.0, 9000.0)
        >>> hybrid = Theory.of("hybrid_shard", ranks=4, parameter_bytes=4000, root_bytes=400)
        >>> full.crossing, hybrid.crossing
        (23200.0, 8000.0)
    """

    held: float
    """Parameters, gradients and optimizer state."""
    sent: float
    """Per step and rank, on average."""
    sent_roughly: float
    """The same as if the root were like any other unit."""
    crossing: float
    """Per step, by all ranks: what leaves a host, if half of the ranks are on another one."""

    @classmethod
    def of(cls, strategy: str, *, ranks: int, parameter_bytes: int, root_bytes: int) -> Theory:
        """For a model of so many bytes, of which the root unit has some."""
        if strategy == UNSHARDED:
            return cls(held=4.0 * parameter_bytes, sent=0.0, sent_roughly=0.0, crossing=0.0)
        divided = STRATEGIES[strategy]
        shares = SHARD_SIZE if divided.hybrid else ranks if divided.state else 1
        replicas = ranks // shares
        kept = ((1, divided.params), (1, divided.gradients), (2, divided.state))
        once = (shares - 1) / shares
        again = once if divided.params else 0.0
        across = 2 * (replicas - 1) / replicas / shares * parameter_bytes
        sent = 2 * once * parameter_bytes + across
        exactly = sent + again * (parameter_bytes - root_bytes)
        # Of the other ranks that a rank sends to directly, so many are on the other host.
        other_host = ranks / 2 / (ranks - 1)
        return cls(
            held=parameter_bytes * sum(times / shares if is_divided else times for times, is_divided in kept),
            sent=exactly,
            sent_roughly=sent + again * parameter_bytes,
            crossing=ranks * (across if divided.hybrid else other_host * exactly),
        )


@attrs.frozen(kw_only=True)
class StrategyResult:
    """One strategy with so many ranks."""

    strategy: str
    ranks: int
    theory: Theory
    unit_bytes: int
    """Parameters of the largest unit."""
    activation_bytes: int
    """What the twin's forward held, on the rank where that was most."""
    rest_bytes: int
    """After a step and ``zero_grad``, on the fullest rank."""
    peak_bytes: int
    """At most during a step, on the fullest rank."""
    peak_phase: str
    """When that was: ``forward``, ``backward`` or ``step``."""
    sent_bytes: float
    """Payload per step, the mean over ranks."""
    device_bytes: float | None
    """What the network device counted in the quietest step, of all ranks; None where nobody counts."""

    @property
    def peak_formula(self) -> float:
        """With the activations."""
        return self.theory.held + self.activation_bytes

    def units_over(self, nbytes: float, formula: float) -> float:
        """How far above the formula, in sizes of the largest unit."""
        return (nbytes - formula) / self.unit_bytes

    def memory_within(self, nbytes: float, formula: float) -> bool:
        """At most the formula, its tolerance and one unit."""
        return nbytes <= (1 + MEMORY_TOLERANCE) * formula + self.unit_bytes

    @property
    def rest_within(self) -> bool:
        """Whether what is held between steps is what it may be."""
        return self.memory_within(self.rest_bytes, self.theory.held)

    @property
    def peak_within(self) -> bool:
        """Whether what is held at most is what it may be."""
        return self.memory_within(self.peak_bytes, self.peak_formula)

    @property
    def traffic_within(self) -> bool:
        """Whether the payload is what it must be, up to the tolerance."""
        return abs(self.sent_bytes - self.theory.sent) <= TRAFFIC_TOLERANCE * self.theory.sent

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        theory = self.theory
        is_twin = self.strategy == UNSHARDED
        return {
            "strategy": self.strategy,
            "ranks": self.ranks,
            "unit_bytes": self.unit_bytes,
            "activation_bytes": self.activation_bytes,
            "formula_bytes": theory.held,
            "rest_bytes": self.rest_bytes,
            "rest_times_formula": self.rest_bytes / theory.held,
            "rest_units_over": self.units_over(self.rest_bytes, theory.held),
            "rest_within": self.rest_within,
            "peak_formula_bytes": self.peak_formula,
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase,
            "peak_times_formula": self.peak_bytes / self.peak_formula,
            "peak_units_over": self.units_over(self.peak_bytes, self.peak_formula),
            "peak_within": self.peak_within,
            "sent_bytes_per_step": self.sent_bytes,
            "sent_formula_bytes": theory.sent,
            "sent_rough_formula_bytes": theory.sent_roughly,
            "sent_times_formula": None if is_twin else self.sent_bytes / theory.sent,
            "sent_within": self.traffic_within,
            "device_bytes_per_step": self.device_bytes,
            "crossing_formula_bytes": theory.crossing,
        }


@attrs.frozen(kw_only=True)
class StrategiesReport:
    """Every strategy for every number of ranks, the twin first."""

    settings: StrategiesSettings
    results: tuple[StrategyResult, ...]
    parameters: int
    parameter_bytes: int
    root_bytes: int
    torch: str
    schedule: str
    partitioner: str
    seconds: float

    def __getitem__(self, which: tuple[int, str]) -> StrategyResult:
        """By number of ranks and strategy."""
        return next(result for result in self.results if (result.ranks, result.strategy) == which)

    @property
    def memory_within(self) -> bool:
        """Whether every strategy holds what it may."""
        return all(result.rest_within and result.peak_within for result in self.results)

    @property
    def traffic_within(self) -> bool:
        """Whether every strategy sends what it must."""
        return all(result.traffic_within for result in self.results)

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {
            **self.settings.to_json(),
            "torch": self.torch,
            "backend": "gloo",
            "schedule_used": self.schedule,
            "partitioner_used": self.partitioner,
            "tokens_per_step": TOKENS,
            "parameters": self.parameters,
            "parameter_bytes": self.parameter_bytes,
            "root_bytes": self.root_bytes,
            "memory_tolerance": MEMORY_TOLERANCE,
            "traffic_tolerance": TRAFFIC_TOLERANCE,
            "memory_within": self.memory_within,
            "traffic_within": self.traffic_within,
            "strategies_counted": [result.to_json() for result in self.results],
            "seconds": self.seconds,
        }


def count_strategies(
    settings: StrategiesSettings, *, on_event: OnEvent | None = None, patience: float = 120.0
) -> StrategiesReport:
    """Start the ranks, group after group, let them count, and put together what they bring home.

    ``on_event`` and ``patience`` are those of :func:`shardrt.launch.launch_ranks`; an event names the ``strategy`` and
    counts trainings ``done`` out of ``settings.all_runs``.
    """
    started = time.monotonic()
    results: list[StrategyResult] = []
    answers: list[Any] = []
    done = 0
    with ExitStack() as cleanup:
        hosts = () if settings.link == NO_LINK else cleanup.enter_context(EmulatedLink(settings.link)).hosts
        for ranks in settings.ranks:
            names = settings.taking_part(ranks)
            answers = launch_ranks(
                "shardrt.bench.strategies_rank",
                {"settings": settings.to_json(), "strategies": names, "done": done},
                ranks=ranks,
                on_event=on_event,
                patience=patience,
                hosts=hosts,
            )
            done += 1 + len(names)
            results += [combine(name, answers) for name in (UNSHARDED, *names)]
    about = {name: answers[0][name] for name in _ABOUT}
    return StrategiesReport(settings=settings, results=tuple(results), **about, seconds=time.monotonic() - started)


_ABOUT = ("parameters", "parameter_bytes", "root_bytes", "torch", "schedule", "partitioner")


def combine(strategy: str, answers: Sequence[Mapping[str, Any]]) -> StrategyResult:
    """What all ranks found of one strategy, as one result."""
    runs = [answer["runs"][strategy] for answer in answers]
    first = answers[0]
    peak_bytes, peak_phase = max((nbytes, phase) for run in runs for phase, nbytes in run["peaks"].items())
    by_step = [count for count in runs[0]["device_bytes"] if count is not None]
    return StrategyResult(
        strategy=strategy,
        ranks=len(answers),
        theory=Theory.of(
            strategy,
            ranks=len(answers),
            parameter_bytes=first["parameter_bytes"],
            root_bytes=first["root_bytes"],
        ),
        unit_bytes=first["unit_bytes"],
        activation_bytes=max(answer["activation_bytes"] for answer in answers),
        rest_bytes=max(run["rest_bytes"] for run in runs),
        peak_bytes=peak_bytes,
        peak_phase=peak_phase,
        sent_bytes=statistics.fmean(run["sent_bytes"] for run in runs),
        device_bytes=min(by_step) if by_step else None,
    )

"""Several ways to train the same, measured on the same ranks in one run: what all such benchmarks share.

Ranks are started once, with one thread each. In every round each contestant in turn trains its own copy of one model,
from the same seed on the same text, and is dropped again: a few steps to warm up, then steps under the clock. Rounds
are interleaved and each starts with another contestant, so that noise of the machine meets all alike; a contestant's
ratio is the median of its rounds' ratios, since absolute times mean little on a busy machine. Peers are used as they
come, without tuning, and so is shardrt.

Bytes on the wire are read from the counters of the network device, for all contestants alike: they are what really
travelled, with the headers and acknowledgements of TCP, and with whatever else used the device meanwhile. Hence the
least of all rounds is reported.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from shardrt.bench.shapes import SIZES, Shape
from shardrt.errors import ConfigError
from shardrt.registry.nearness import did_you_mean

DDP = "ddp_adamw"
TORCH_ZERO = "ddp_torch_zero"
PEERS: Mapping[str, str] = MappingProxyType({DDP: "DDP + AdamW", TORCH_ZERO: "DDP + torch ZeRO"})
"""Those that every contest has, first: what the others are compared to."""
WARM_UP_STEPS = 2
"""The first step makes the optimizer's state, and in the second DDP lays out its buckets anew."""


@attrs.frozen(kw_only=True)
class ContestSettings:
    """What to measure, in a form that travels to the ranks as JSON. Each benchmark says who takes part."""

    ranks: int = 2
    steps: int = 20
    rounds: int = 3
    size: str = "small"

    def __attrs_post_init__(self) -> None:
        if not _is_count(self.ranks, 2):
            raise ConfigError(
                f"ranks must be a whole number from 2 up, got {self.ranks!r}: alone there is nothing to shard"
            )
        for name, value in {"steps": self.steps, "rounds": self.rounds}.items():
            if not _is_count(value, 1):
                raise ConfigError(f"{name} must be a whole number from 1 up, got {value!r}")
        if self.size not in self.shapes:
            raise ConfigError(
                f"unknown size {self.size!r}; sizes: {', '.join(self.shapes)}{did_you_mean(self.size, self.shapes)}"
            )

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The models that there are, by size."""
        return SIZES

    @property
    def shape(self) -> Shape:
        """The model to train."""
        return self.shapes[self.size]

    @property
    def contestants(self) -> Mapping[str, str]:
        """Name to how tables call it, in the order of the first round."""
        raise NotImplementedError

    @property
    def all_steps(self) -> int:
        """Every step that a rank takes, with those that warm up."""
        return self.rounds * len(self.contestants) * (WARM_UP_STEPS + self.steps)

    def in_turn(self, number: int) -> list[str]:
        """The contestants, starting with another one in each round; the first starts with what all are compared to."""
        names = list(self.contestants)
        first = number % len(names)
        return names[first:] + names[:first]

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return attrs.asdict(self)


@attrs.frozen(kw_only=True)
class ContestResult:
    """One contestant, over all rounds and ranks."""

    name: str
    label: str
    """What tables call it."""
    step_seconds: Sequence[Sequence[float]]
    """For each round and step, the time of the slowest rank."""
    wire_bytes: Sequence[float] | None
    """For each round, bytes per step and rank; None where the system does not count them."""
    optimizer_bytes: int
    """State on the rank that has most."""
    largest_difference: float
    """From the parameters that DDP + AdamW ended with, on any rank in any round."""
    ranks_agree: bool

    @property
    def seconds(self) -> float:
        """The median of all timed steps."""
        return statistics.median(self._all_seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between these two is the middle half of all timed steps."""
        if len(self._all_seconds) == 1:
            return self.seconds, self.seconds
        low, _, high = statistics.quantiles(self._all_seconds, n=4, method="inclusive")
        return low, high

    @property
    def fastest(self) -> float:
        """The step that other programs disturbed least."""
        return min(self._all_seconds)

    @property
    def round_seconds(self) -> list[float]:
        """The median step of each round."""
        return [statistics.median(steps) for steps in self.step_seconds]

    @property
    def least_wire_bytes(self) -> float | None:
        """The round with the least other traffic on the device."""
        return min(self.wire_bytes) if self.wire_bytes else None

    def times(self, other: ContestResult) -> float:
        """How many times the other's time a step takes: the median of the rounds' ratios."""
        pairs = zip(self.round_seconds, other.round_seconds, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    @property
    def _all_seconds(self) -> list[float]:
        return [seconds for steps in self.step_seconds for seconds in steps]


@attrs.frozen(kw_only=True)
class ContestReport:
    """All contestants, in the order of ``settings.contestants``."""

    settings: ContestSettings
    results: tuple[ContestResult, ...]
    parameters: int
    parameter_bytes: int
    torch: str
    seconds: float

    def __getitem__(self, name: str) -> ContestResult:
        return next(result for result in self.results if result.name == name)

    @property
    def minimum_wire_bytes(self) -> float:
        """What a rank must send per step, on average: an all-reduce, or a reduce-scatter and an all-gather."""
        ranks = self.settings.ranks
        return 2 * (ranks - 1) / ranks * self.parameter_bytes

    @property
    def ranks_agree(self) -> bool:
        """Whether the ranks of every contestant ended each round with the same bits."""
        return all(result.ranks_agree for result in self.results)

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values; a difference that is not finite becomes null."""
        shape = self.settings.shape
        return {
            **self.settings.to_json(),
            "torch": self.torch,
            "backend": "gloo",
            "threads_per_rank": 1,
            "warm_up_steps": WARM_UP_STEPS,
            "batch": shape.batch,
            "context": shape.context,
            "parameters": self.parameters,
            "parameter_bytes": self.parameter_bytes,
            "minimum_wire_bytes_per_step": self.minimum_wire_bytes,
            "ranks_agree": self.ranks_agree,
            "contestants": [self.row(result) for result in self.results],
            "seconds": self.seconds,
        }

    def row(self, result: ContestResult) -> dict[str, Any]:
        """What the document says of one contestant."""
        return {
            **self.own_row(result),
            "times_ddp_adamw": result.times(self[DDP]),
            "times_torch_zero": result.times(self[TORCH_ZERO]),
        }

    def own_row(self, result: ContestResult) -> dict[str, Any]:
        """The part that compares it to nobody."""
        wire = result.least_wire_bytes
        difference = result.largest_difference
        return {
            "name": result.name,
            "label": result.label,
            "ms_per_step": 1e3 * result.seconds,
            "ms_per_step_quartiles": [1e3 * seconds for seconds in result.quartiles],
            "ms_per_step_fastest": 1e3 * result.fastest,
            "ms_per_step_by_round": [1e3 * seconds for seconds in result.round_seconds],
            "optimizer_bytes": result.optimizer_bytes,
            "wire_bytes_per_step": wire,
            "wire_bytes_per_step_by_round": None if result.wire_bytes is None else list(result.wire_bytes),
            "times_minimum_wire_bytes": None if wire is None else wire / self.minimum_wire_bytes,
            "largest_parameter_difference": difference if math.isfinite(difference) else None,
            "ranks_agree": result.ranks_agree,
        }


def combine(name: str, settings: ContestSettings, by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> ContestResult:
    """One contestant's runs, by rank and round, as one result.

    Example:
        >>> from shardrt.bench.contest import combine
        >>> from shardrt.bench.peers import PeersSettings
        >>> run = {"optimizer_bytes": 8, "largest_difference": 0.0, "digest": "a1", "wire_bytes": 4000}
        >>> runs = [[{**run, "step_seconds": [0.1, 0.4]}], [{**run, "step_seconds": [0.2, 0.3]}]]
        >>> result = combine("shardrt_flat", PeersSettings(steps=2, rounds=1), runs)
        >>> result.step_seconds, result.wire_bytes
        ([[0.2, 0.4]], [1000.0])
    """
    by_round = list(zip(*by_rank, strict=True))
    runs = [run for runs in by_round for run in runs]
    counted = [ranks[0]["wire_bytes"] for ranks in by_round]
    return ContestResult(
        name=name,
        label=settings.contestants[name],
        step_seconds=[
            [max(step) for step in zip(*(run["step_seconds"] for run in ranks), strict=True)] for ranks in by_round
        ],
        wire_bytes=None if None in counted else [count / settings.ranks / settings.steps for count in counted],
        optimizer_bytes=max(run["optimizer_bytes"] for run in runs),
        largest_difference=max(run["largest_difference"] for run in runs),
        ranks_agree=all(len({run["digest"] for run in ranks}) == 1 for ranks in by_round),
    )


def findings(settings: ContestSettings, answers: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """What ranks brought home, as the fields of a :class:`ContestReport`."""
    return {
        "settings": settings,
        "results": tuple(
            combine(name, settings, [answer["runs"][name] for answer in answers]) for name in settings.contestants
        ),
        **{field: answers[0][field] for field in ("parameters", "parameter_bytes", "torch")},
        "seconds": seconds,
    }


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least

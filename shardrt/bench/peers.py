"""ZeRO-1 through shardrt beside its peers: the same training on the same ranks in one run, on the CPU over Gloo.

Ranks are started once, with one thread each. In every round each contestant in turn trains its own copy of one model,
from the same seed on the same text, and is dropped again: a few steps to warm up, then steps under the clock. Rounds
are interleaved and each starts with another contestant, so that noise of the machine meets all alike; a contestant's
ratio is the median of its rounds' ratios, since absolute times mean little on a busy machine. Peers are used as they
come, without tuning, and so is shardrt.

Bytes on the wire are read from the counters of the loopback device, for all contestants alike: they are what really
travelled, with the headers and acknowledgements of TCP, and with whatever else the machine sent to itself meanwhile.
Hence the least of all rounds is reported.

DeepSpeed and FSDP are not measured here.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from shardrt.errors import ConfigError
from shardrt.launch import OnEvent, launch_ranks
from shardrt.registry.nearness import did_you_mean

DDP = "ddp_adamw"
TORCH_ZERO = "ddp_torch_zero"
CONTESTANTS: Mapping[str, str] = MappingProxyType(
    {
        DDP: "DDP + AdamW",
        TORCH_ZERO: "DDP + torch ZeRO",
        "shardrt_flat": "shardrt, flat",
        "shardrt_greedy": "shardrt, greedy",
        "shardrt_under_ddp": "DDP + shardrt, greedy",
    }
)
"""Name to how tables call it, in the order of the first round."""
NOT_MEASURED = ("DeepSpeed", "FSDP")
WARM_UP_STEPS = 2
"""The first step makes the optimizer's state, and in the second DDP lays out its buckets anew."""


@attrs.frozen(kw_only=True)
class ModelSize:
    """A shape of the demo's transformer, and how many windows of text each rank takes per step."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int


SIZES: Mapping[str, ModelSize] = MappingProxyType(
    {
        "small": ModelSize(width=128, layers=5, heads=4, context=64, batch=4),
        "40m": ModelSize(width=640, layers=8, heads=10, context=128, batch=2),
    }
)
"""About one million and about forty million parameters."""


@attrs.frozen(kw_only=True)
class PeersSettings:
    """What to measure, in a form that travels to the ranks as JSON.

    Example:
        >>> from shardrt.bench.peers import PeersSettings
        >>> PeersSettings(ranks=1)
        Traceback (most recent call last):
        shardrt.errors.ConfigError: ranks must be a whole number from 2 up, got 1: alone there is nothing to shard
    """

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
        if self.size not in SIZES:
            raise ConfigError(f"unknown size {self.size!r}; sizes: {', '.join(SIZES)}{did_you_mean(self.size, SIZES)}")

    @property
    def all_steps(self) -> int:
        """Every step that a rank takes, with those that warm up."""
        return self.rounds * len(CONTESTANTS) * (WARM_UP_STEPS + self.steps)

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return attrs.asdict(self)


@attrs.frozen(kw_only=True)
class PeerResult:
    """One contestant, over all rounds and ranks."""

    name: str
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
    def label(self) -> str:
        """What tables call it."""
        return CONTESTANTS[self.name]

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
        """The round with the least other traffic on the machine."""
        return min(self.wire_bytes) if self.wire_bytes else None

    def times(self, other: PeerResult) -> float:
        """How many times the other's time a step takes: the median of the rounds' ratios."""
        pairs = zip(self.round_seconds, other.round_seconds, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    @property
    def _all_seconds(self) -> list[float]:
        return [seconds for steps in self.step_seconds for seconds in steps]


@attrs.frozen(kw_only=True)
class PeersReport:
    """All contestants, in the order of :data:`CONTESTANTS`."""

    settings: PeersSettings
    results: tuple[PeerResult, ...]
    parameters: int
    parameter_bytes: int
    torch: str
    seconds: float

    def __getitem__(self, name: str) -> PeerResult:
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
        size = SIZES[self.settings.size]
        return {
            **self.settings.to_json(),
            "torch": self.torch,
            "backend": "gloo",
            "threads_per_rank": 1,
            "warm_up_steps": WARM_UP_STEPS,
            "batch": size.batch,
            "context": size.context,
            "parameters": self.parameters,
            "parameter_bytes": self.parameter_bytes,
            "minimum_wire_bytes_per_step": self.minimum_wire_bytes,
            "ranks_agree": self.ranks_agree,
            "contestants": [self._row(result) for result in self.results],
            "not_measured_here": list(NOT_MEASURED),
            "seconds": self.seconds,
        }

    def _row(self, result: PeerResult) -> dict[str, Any]:
        wire = result.least_wire_bytes
        difference = result.largest_difference
        return {
            "name": result.name,
            "label": result.label,
            "ms_per_step": 1e3 * result.seconds,
            "ms_per_step_quartiles": [1e3 * seconds for seconds in result.quartiles],
            "ms_per_step_fastest": 1e3 * result.fastest,
            "ms_per_step_by_round": [1e3 * seconds for seconds in result.round_seconds],
            "times_ddp_adamw": result.times(self[DDP]),
            "times_torch_zero": result.times(self[TORCH_ZERO]),
            "optimizer_bytes": result.optimizer_bytes,
            "wire_bytes_per_step": wire,
            "wire_bytes_per_step_by_round": None if result.wire_bytes is None else list(result.wire_bytes),
            "times_minimum_wire_bytes": None if wire is None else wire / self.minimum_wire_bytes,
            "largest_parameter_difference": difference if math.isfinite(difference) else None,
            "ranks_agree": result.ranks_agree,
        }


def measure_peers(settings: PeersSettings, *, on_event: OnEvent | None = None, patience: float = 120.0) -> PeersReport:
    """Start the ranks, let them measure, and put together what they bring home.

    ``on_event`` and ``patience`` are those of :func:`shardrt.launch.launch_ranks`; an event names the ``contestant``
    and counts the steps ``done`` out of ``settings.all_steps``.
    """
    started = time.monotonic()
    answers = launch_ranks(
        "shardrt.bench.peers_rank", settings.to_json(), ranks=settings.ranks, on_event=on_event, patience=patience
    )
    return PeersReport(
        settings=settings,
        results=tuple(combine(name, settings, [answer["runs"][name] for answer in answers]) for name in CONTESTANTS),
        parameters=answers[0]["parameters"],
        parameter_bytes=answers[0]["parameter_bytes"],
        torch=answers[0]["torch"],
        seconds=time.monotonic() - started,
    )


def combine(name: str, settings: PeersSettings, by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> PeerResult:
    """One contestant's runs, by rank and round, as one result.

    Example:
        >>> from shardrt.bench.peers import PeersSettings, combine
        >>> run = {"optimizer_bytes": 8, "largest_difference": 0.0, "digest": "a1", "wire_bytes": 4000}
        >>> runs = [[{**run, "step_seconds": [0.1, 0.4]}], [{**run, "step_seconds": [0.2, 0.3]}]]
        >>> result = combine("shardrt_flat", PeersSettings(steps=2, rounds=1), runs)
        >>> result.step_seconds, result.wire_bytes
        ([[0.2, 0.4]], [1000.0])
    """
    by_round = list(zip(*by_rank, strict=True))
    runs = [run for runs in by_round for run in runs]
    counted = [ranks[0]["wire_bytes"] for ranks in by_round]
    return PeerResult(
        name=name,
        step_seconds=[
            [max(step) for step in zip(*(run["step_seconds"] for run in ranks), strict=True)] for ranks in by_round
        ],
        wire_bytes=None if None in counted else [count / settings.ranks / settings.steps for count in counted],
        optimizer_bytes=max(run["optimizer_bytes"] for run in runs),
        largest_difference=max(run["largest_difference"] for run in runs),
        ranks_agree=all(len({run["digest"] for run in ranks}) == 1 for ranks in by_round),
    )


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least

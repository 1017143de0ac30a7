"""``rt.shard`` beside FSDP and DeepSpeed, on loopback. How: see :mod:`shardrt.bench.contest`.

Beside the time of a step, the memory that a contestant needs is measured: the system's high-water mark of a rank, from
before the model is made until the last timed step, above what was resident before. Peers that are not installed are
named, and never left out in silence.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from shardrt.bench.contest import DDP, PEERS, ContestReport, ContestResult, ContestSettings, combine
from shardrt.errors import ConfigError
from shardrt.launch import OnEvent, launch_ranks
from shardrt.registry import load_registry
from shardrt.registry.nearness import did_you_mean

OURS: Mapping[str, str] = MappingProxyType(
    {name: f"shardrt, {name}" for name in ("shard_optim", "shard_grad_op", "full_shard")}
)
"""Strategies of ``rt.shard``."""
FSDP2: Mapping[str, str] = MappingProxyType(
    {"fsdp2_keep": "FSDP2, keep", "fsdp2_reshard": "FSDP2, reshard"}  # parameters, after forward
)
FSDP1: Mapping[str, str] = MappingProxyType(
    {"fsdp1_shard_grad_op": "FSDP1, SHARD_GRAD_OP", "fsdp1_full_shard": "FSDP1, FULL_SHARD"}
)
DEEPSPEED: Mapping[str, str] = MappingProxyType(
    {f"deepspeed_{stage}": f"DeepSpeed, stage {stage}" for stage in (1, 2, 3)}
)
CONTESTANTS: Mapping[str, str] = MappingProxyType({DDP: PEERS[DDP], **OURS, **FSDP2, **FSDP1, **DEEPSPEED})
"""Name to how tables call it, in the order of the first round."""
RIVALS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "shard_optim": ("deepspeed_1",),
        "shard_grad_op": ("fsdp2_keep", "fsdp1_shard_grad_op", "deepspeed_2"),
        "full_shard": ("fsdp2_reshard", "fsdp1_full_shard", "deepspeed_3"),
    }
)
"""Who shards as much as each strategy of ours."""
TOLERANCE = 1e-4
"""The largest difference from DDP + AdamW's parameters that summing in another order explains, after some tens of
steps: Adam divides by the size of a gradient, and so makes much of the last bits of a small one."""


def missing_peers() -> dict[str, str]:
    """Contestants that cannot take part here, and how they could.

    Example:
        >>> from shardrt.bench.shard import missing_peers
        >>> set(missing_peers()) <= {"deepspeed_1", "deepspeed_2", "deepspeed_3"}
        True
    """
    if importlib.util.find_spec("deepspeed") is not None:
        return {}
    return dict.fromkeys(DEEPSPEED, "DeepSpeed: not installed; pip install deepspeed")


def _tuple(given: Iterable[str]) -> tuple[str, ...]:
    return tuple(given)  # they travel to the ranks as a list


@attrs.frozen(kw_only=True)
class ShardSettings(ContestSettings):
    """What to measure.

    Example:
        >>> from shardrt.bench.shard import ShardSettings
        >>> list(ShardSettings(only=["full_shard", "fsdp2_reshard"]).contestants)
        ['ddp_adamw', 'full_shard', 'fsdp2_reshard']
        >>> ShardSettings(only=["fsdp3"])
        Traceback (most recent call last):
        shardrt.errors.ConfigError: unknown contestant 'fsdp3'; there are: ddp_adamw, shard_optim, ...
    """

    only: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    """These, and DDP + AdamW, which all are compared to; nothing is everybody."""
    schedule: str | None = None
    """Of ours; None is the runtime's default."""
    absent: tuple[str, ...] = attrs.field(factory=lambda: tuple(missing_peers()), converter=_tuple)
    """Who is asked for, but not installed."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        for name in self.only:
            if name not in CONTESTANTS:
                raise ConfigError(
                    f"unknown contestant {name!r}; there are: {', '.join(CONTESTANTS)}{did_you_mean(name, CONTESTANTS)}"
                )
        if self.schedule is not None:  # before ranks are started, which would each find out for themselves
            load_registry().schedules.get(self.schedule)

    @property
    def contestants(self) -> Mapping[str, str]:
        """Those that are asked for and installed."""
        return {name: label for name, label in self.asked_for.items() if name not in self.absent}

    @property
    def asked_for(self) -> Mapping[str, str]:
        """Also those that are not installed."""
        return {name: label for name, label in CONTESTANTS.items() if name in (DDP, *(self.only or CONTESTANTS))}


@attrs.frozen(kw_only=True)
class ShardResult(ContestResult):
    """One contestant, over all rounds and ranks."""

    peak_bytes: Sequence[int] | None
    """For each round, of the rank that needed most; None where the system does not say."""

    @property
    def least_peak_bytes(self) -> int | None:
        """Of the round in which nothing was loaded or warmed up for the first time."""
        return min(self.peak_bytes) if self.peak_bytes else None

    @property
    def is_alike(self) -> bool:
        """Whether it trained what DDP + AdamW trained."""
        return self.largest_difference <= TOLERANCE

    def times_memory(self, other: ShardResult) -> float | None:
        """How many times the other's memory it needs."""
        mine, theirs = self.least_peak_bytes, other.least_peak_bytes
        return None if mine is None or not theirs else mine / theirs


@attrs.frozen(kw_only=True)
class Comparison:
    """A strategy of ours beside somebody who shards as much."""

    strategy: str
    rival: str
    time: float
    """Of a step, in times of the rival's: the median of the rounds' ratios."""
    memory: float | None


@attrs.frozen(kw_only=True)
class ShardReport(ContestReport):
    """All contestants that were there, and what is missing."""

    settings: ShardSettings
    results: tuple[ShardResult, ...]
    missing: Mapping[str, str]
    """Contestants that were asked for but are not installed, and how they would be."""
    schedule: str

    @property
    def all_alike(self) -> bool:
        """Whether everybody trained the same, on all ranks."""
        return self.ranks_agree and all(result.is_alike for result in self.results)

    @property
    def comparisons(self) -> list[Comparison]:
        """Every strategy beside its rivals, as far as they took part."""
        there = {result.name: result for result in self.results}
        return [
            Comparison(
                strategy=strategy,
                rival=rival,
                time=there[strategy].times(there[rival]),
                memory=there[strategy].times_memory(there[rival]),
            )
            for strategy, rivals in RIVALS.items()
            for rival in rivals
            if strategy in there and rival in there
        ]

    def row(self, result: ContestResult) -> dict[str, Any]:
        """What the document says of one contestant."""
        assert isinstance(result, ShardResult)
        reference = next(one for one in self.results if one.name == DDP)
        return {
            **self.own_row(result),
            "times_ddp_adamw": result.times(reference),
            "peak_bytes": result.least_peak_bytes,
            "peak_bytes_by_round": None if result.peak_bytes is None else list(result.peak_bytes),
            "times_ddp_adamw_memory": result.times_memory(reference),
            "alike": result.is_alike,
        }

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {
            **super().to_json(),
            "schedule_used": self.schedule,
            "tolerance": TOLERANCE,
            "missing": dict(self.missing),
            "comparisons": [attrs.asdict(one) for one in self.comparisons],
        }


def measure_shard(settings: ShardSettings, *, on_event: OnEvent | None = None, patience: float = 120.0) -> ShardReport:
    """Start the ranks, let them measure, and put together what they bring home.

    ``on_event`` and ``patience`` are those of :func:`shardrt.launch.launch_ranks`; an event names the ``contestant``
    and counts the steps ``done`` out of ``settings.all_steps``.
    """
    started = time.monotonic()
    answers = launch_ranks(
        "shardrt.bench.shard_rank", settings.to_json(), ranks=settings.ranks, on_event=on_event, patience=patience
    )
    reasons = missing_peers()
    return ShardReport(
        settings=settings,
        results=tuple(
            combine_shard(name, settings, [answer["runs"][name] for answer in answers]) for name in settings.contestants
        ),
        **{field: answers[0][field] for field in ("parameters", "parameter_bytes", "torch", "schedule")},
        missing={name: reasons.get(name, "not installed") for name in settings.asked_for if name in settings.absent},
        seconds=time.monotonic() - started,
    )


def combine_shard(name: str, settings: ContestSettings, by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> ShardResult:
    """One contestant's runs, by rank and round, as one result."""
    whole = combine(name, settings, by_rank)
    peaks = [[run["peak_bytes"] for run in ranks] for ranks in zip(*by_rank, strict=True)]
    told = not any(peak is None for ranks in peaks for peak in ranks)
    fields = {field.name: getattr(whole, field.name) for field in attrs.fields(ContestResult)}
    return ShardResult(**fields, peak_bytes=[max(ranks) for ranks in peaks] if told else None)

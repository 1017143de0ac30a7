"""What a scenario of ``shardrt bench all`` found: every contestant, with its step split into three parts.

Note [Three parts of a step]
============================
*Compute* is what forward and backward of the bare model take: in every round the ranks also train without talking and
without updating, all at once as always. *Step* is the time inside torch's own AdamW, whichever thread calls it (see
Note [Whose update] in :mod:`shardrt.bench.updates`). *Exposed communication* is all the rest of a step: waiting for
bytes, copies, and whatever communication takes away from computing on the same cores. The definition needs nothing of
a contestant but a clock around its step, so it is the same for all. Shares are taken in each round, of the slowest
rank, and are medians over rounds. Where updates overlap with computing on a core of their own, or where noise made
computing alone slower than the whole step, the rest is nothing, and compute is cut so that the parts add up.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs

from shardrt.bench.contest import DDP, TORCH_ZERO, ContestReport, ContestResult
from shardrt.bench.link import EmulatedLink, bits_per_second
from shardrt.bench.overlap import NO_LINK
from shardrt.bench.scenarios import Scenario, ScenarioSettings
from shardrt.bench.shard import ShardResult, combine_shard
from shardrt.bench.ways import Way
from shardrt.launch import OnEvent, launch_ranks


@attrs.frozen(kw_only=True)
class Split:
    """A step in seconds, part by part. See Note [Three parts of a step]."""

    compute: float
    exposed: float
    update: float

    @classmethod
    def of(cls, step: Sequence[float], compute: Sequence[float], update: Sequence[float], seconds: float) -> Split:
        """From medians of each round, and the whole to share out.

        Example:
            >>> from shardrt.bench.scenario_report import Split
            >>> Split.of([2.0, 4.0], [1.0, 2.0], [0.5, 1.0], 3.0)
            Split(compute=1.5, exposed=0.75, update=0.75)
            >>> Split.of([1.0], [1.5], [0.25], 1.0)  # noise: computing alone took longer than the whole step
            Split(compute=0.75, exposed=0.0, update=0.25)
        """
        rounds = list(zip(step, compute, update, strict=True))
        updating = min(1.0, statistics.median(updates / whole for whole, _, updates in rounds))
        rest = statistics.median(max(0.0, 1 - (computing + updates) / whole) for whole, computing, updates in rounds)
        rest = min(rest, 1 - updating)
        return cls(compute=seconds * (1 - rest - updating), exposed=seconds * rest, update=seconds * updating)


@attrs.frozen(kw_only=True)
class ScenarioResult(ShardResult):
    """One contestant, over all rounds and ranks."""

    update_seconds: Sequence[float]
    """For each round the median step's, of the slowest rank."""

    @property
    def way(self) -> Way:
        """Who it is."""
        return Way.parse(self.name)


@attrs.frozen(kw_only=True)
class ScenarioReport(ContestReport):
    """All contestants of a scenario."""

    scenario: Scenario
    settings: ScenarioSettings
    results: tuple[ScenarioResult, ...]
    compute_seconds: Sequence[float]
    """For each round the median of forward and backward alone, of the slowest rank."""
    refused: Mapping[str, str] = attrs.field(factory=dict)
    """Contestants that could not be built here, and why."""

    @property
    def all_alike(self) -> bool:
        """Whether everybody trained what DDP + AdamW trained, on all ranks."""
        return self.ranks_agree and all(result.is_alike for result in self.results)

    @property
    def is_linked(self) -> bool:
        """Whether the ranks are on two hosts."""
        return self.settings.link != NO_LINK

    @property
    def minimum_wire_bytes(self) -> float:
        """What a rank must send per step, on average; with a link what must cross it, by rank."""
        if not self.is_linked:
            return super().minimum_wire_bytes
        # Both ways the sum of one host's gradients must go to the other, and half of the new parameters come back.
        return 2 * self.parameter_bytes / self.settings.ranks

    def wire_limit(self, way: Way) -> float | None:
        """How long the least bytes of a step take on the link, both ways at once; None without one."""
        if not self.is_linked:
            return None
        # Hosts that hold one copy between them get half of the parameters twice.
        times = 1.5 if way.level == "zero3" else 1.0
        return 8 * times * self.parameter_bytes / bits_per_second(self.settings.link)

    def split(self, result: ScenarioResult) -> Split:
        """Its step, part by part."""
        return Split.of(result.round_seconds, self.compute_seconds, result.update_seconds, result.seconds)

    def rivals(self, result: ScenarioResult) -> list[ScenarioResult]:
        """The peers that shard as much, and DDP + AdamW."""
        return [
            other
            for other in self.results
            if not other.way.is_ours and (other.name == DDP or other.way.level == result.way.level)
        ]

    def row(self, result: ContestResult) -> dict[str, Any]:
        """What the document says of one contestant."""
        assert isinstance(result, ScenarioResult)
        there = {one.name: one for one in self.results}
        split, limit = self.split(result), self.wire_limit(result.way)
        zero = there.get(TORCH_ZERO)
        return {
            **self.own_row(result),
            "ours": result.way.is_ours,
            "level": result.way.level,
            "strategy": result.way.strategy,
            "schedule": result.way.schedule or None,
            "backend": result.way.backend,
            "times_ddp_adamw": result.times(there[DDP]),
            "times_torch_zero": None if zero is None else result.times(zero),
            "compute_ms": 1e3 * split.compute,
            "exposed_ms": 1e3 * split.exposed,
            "update_ms": 1e3 * split.update,
            "peak_bytes": result.least_peak_bytes,
            "peak_bytes_by_round": None if result.peak_bytes is None else list(result.peak_bytes),
            "times_ddp_adamw_memory": result.times_memory(there[DDP]),
            "wire_limit_ms": None if limit is None else 1e3 * limit,
            "times_wire_limit": None if limit is None else result.seconds / limit,
            "alike": result.is_alike,
        }

    def comparisons(self) -> list[dict[str, Any]]:
        """Each of ours beside each of its rivals, as ratios of time and of memory."""
        return [
            {
                "ours": result.name,
                "rival": rival.name,
                "time": result.times(rival),
                "time_by_round": [
                    mine / theirs for mine, theirs in zip(result.round_seconds, rival.round_seconds, strict=True)
                ],
                "memory": result.times_memory(rival),
            }
            for result in self.results
            if result.way.is_ours
            for rival in self.rivals(result)
        ]

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {
            "name": self.scenario.name,
            "title": self.scenario.title,
            "about": self.scenario.about,
            **{key: value for key, value in super().to_json().items() if key not in ("ways", "backend", "contestants")},
            "ranks_per_host": self.settings.ranks_per_host,
            "compute_ms": 1e3 * statistics.median(self.compute_seconds),
            "all_alike": self.all_alike,
            "contestants": [self.row(result) for result in self.results],
            "comparisons": self.comparisons(),
        }


def combine_scenario(
    name: str, settings: ScenarioSettings, by_rank: Sequence[Sequence[Mapping[str, Any]]]
) -> ScenarioResult:
    """One contestant's runs, by rank and round, as one result."""
    whole = combine_shard(name, settings, by_rank)
    fields = {field.name: getattr(whole, field.name) for field in attrs.fields(ShardResult)}
    updates = [[run["update_seconds"] for run in ranks] for ranks in zip(*by_rank, strict=True)]
    return ScenarioResult(**fields, update_seconds=slowest_medians(updates))


def slowest_medians(by_round: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """From seconds by round, rank and step to each round's median step, of the slowest rank.

    Example:
        >>> from shardrt.bench.scenario_report import slowest_medians
        >>> slowest_medians([[[1.0, 2.0, 9.0], [3.0, 1.0, 4.0]]])
        [3.0]
    """
    return [
        statistics.median(max(step) for step in zip(*ranks, strict=True)) if ranks and ranks[0] else math.nan
        for ranks in by_round
    ]


def measure_scenario(
    scenario: Scenario, settings: ScenarioSettings, *, on_event: OnEvent | None = None, patience: float = 300.0
) -> ScenarioReport:
    """Bring the link up if there is one, let ranks measure, and put together what they bring home.

    ``on_event`` and ``patience`` are those of :func:`shardrt.launch.launch_ranks`; an event names the ``contestant``
    and counts the steps ``done`` out of ``settings.all_steps``.
    """
    started = time.monotonic()
    with ExitStack() as cleanup:
        hosts = () if settings.link == NO_LINK else cleanup.enter_context(EmulatedLink(settings.link)).hosts
        answers = launch_ranks(
            "shardrt.bench.scenario_rank",
            settings.to_json(),
            ranks=settings.ranks,
            on_event=on_event,
            patience=patience,
            hosts=hosts,
        )
    return ScenarioReport(
        scenario=scenario,
        settings=settings,
        results=tuple(
            combine_scenario(name, settings, [answer["runs"][name] for answer in answers])
            for name in settings.contestants
            if name not in answers[0]["refused"]
        ),
        refused=answers[0]["refused"],
        compute_seconds=slowest_medians(list(zip(*(answer["compute"] for answer in answers), strict=True))),
        **{field: answers[0][field] for field in ("parameters", "parameter_bytes", "torch")},
        seconds=time.monotonic() - started,
    )

"""The schedules beside DDP and torch's ZeRO, over an emulated link or loopback. How: see :mod:`shardrt.bench.contest`.

When all rounds are done, each schedule trains a few more steps that are recorded but not timed, and the share of
communication that was hidden is read from the timelines.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs

from shardrt.bench.contest import PEERS, WARM_UP_STEPS, ContestReport, ContestSettings, findings
from shardrt.bench.link import EmulatedLink, bits_per_second
from shardrt.errors import ConfigError
from shardrt.launch import OnEvent, launch_ranks
from shardrt.registry import load_registry
from shardrt.timeline.analysis import analyse, total
from shardrt.timeline.reading import read_timelines

NO_LINK = "none"
RECORDED_STEPS = 4
"""Per schedule, after as many steps to warm up as elsewhere."""
_OURS = "shardrt"


def built_in_schedules() -> tuple[str, ...]:
    """The names of the schedules that come with shardrt, the plain one first.

    Example:
        >>> from shardrt.bench.overlap import built_in_schedules
        >>> built_in_schedules()[:3]
        ('sync', 'bucket', 'interleaved')
    """
    names = [entry.record.name for entry in load_registry().schedules if entry.distribution == _OURS]
    return tuple(sorted(names, key=lambda name: (name != "sync", name)))


def _names(given: Iterable[str]) -> tuple[str, ...]:
    return tuple(given)  # they travel to the ranks as a list


@attrs.frozen(kw_only=True)
class OverlapSettings(ContestSettings):
    """What to measure.

    Example:
        >>> from shardrt.bench.overlap import OverlapSettings
        >>> list(OverlapSettings(schedules=["bucket"]).contestants)
        ['ddp_adamw', 'ddp_torch_zero', 'bucket']
        >>> OverlapSettings(link="1gbit", ranks=4)
        Traceback (most recent call last):
        shardrt.errors.ConfigError: a link joins 2 hosts with one rank each, got 4 ranks; use 2, or link='none'
    """

    link: str = NO_LINK
    partitioner: str = "bucket"
    """By default the one that splits every bucket evenly: only then do both directions of a link carry each of them."""
    bucket_mb: float | None = None
    schedules: tuple[str, ...] = attrs.field(factory=built_in_schedules, converter=_names)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.link != NO_LINK:
            bits_per_second(self.link)
            if self.ranks != 2:
                raise ConfigError(
                    f"a link joins 2 hosts with one rank each, got {self.ranks} ranks; use 2, or link={NO_LINK!r}"
                )
        # Before ranks are started, which would each find out for themselves.
        registry = load_registry()
        registry.partitioners.get(self.partitioner)
        for schedule in self.schedules:
            registry.schedules.get(schedule)

    @property
    def contestants(self) -> Mapping[str, str]:
        """The peers, and every schedule by its name."""
        return {**PEERS, **{name: f"shardrt, {name}" for name in self.schedules}}

    @property
    def all_steps(self) -> int:
        """Every step that a rank takes, with those that warm up and those that are recorded."""
        return super().all_steps + len(self.schedules) * (WARM_UP_STEPS + RECORDED_STEPS)


@attrs.frozen(kw_only=True)
class OverlapReport(ContestReport):
    """All contestants, and what their timelines say."""

    settings: OverlapSettings
    hidden: Mapping[str, float | None]
    """For each schedule the share of communication that no rank waited for; None if there was none."""

    @property
    def wire_seconds(self) -> float | None:
        """How long the least possible bytes of a step take on the link, both ways at once; None without one."""
        if self.settings.link == NO_LINK:
            return None
        return 8 * self.minimum_wire_bytes / bits_per_second(self.settings.link)

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        wire = self.wire_seconds
        return {
            **super().to_json(),
            "wire_limit_ms_per_step": None if wire is None else 1e3 * wire,
            "hidden_share": dict(self.hidden),
        }


def measure_overlap(
    settings: OverlapSettings,
    *,
    timelines: Path | None = None,
    on_event: OnEvent | None = None,
    patience: float = 120.0,
) -> OverlapReport:
    """Bring the link up, let ranks measure, take it down, and put together what they bring home.

    ``timelines`` is where to keep the recordings, in a directory for each schedule. ``on_event`` and ``patience`` are
    those of :func:`shardrt.launch.launch_ranks`; an event names the ``contestant`` and counts the steps ``done`` out
    of ``settings.all_steps``.
    """
    started = time.monotonic()
    with ExitStack() as cleanup:
        if timelines is None:
            folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="shardrt-")))
        else:
            folder = timelines.resolve()
        hosts = () if settings.link == NO_LINK else cleanup.enter_context(EmulatedLink(settings.link)).hosts
        answers = launch_ranks(
            "shardrt.bench.overlap_rank",
            {"settings": settings.to_json(), "timelines": str(folder)},
            ranks=settings.ranks,
            on_event=on_event,
            patience=patience,
            hosts=hosts,
        )
        hidden = {name: _hidden_share(folder / name, settings.ranks) for name in settings.schedules}
    return OverlapReport(hidden=hidden, **findings(settings, answers, time.monotonic() - started))


def _hidden_share(folder: Path, ranks: int) -> float | None:
    """Over all ranks and all recorded steps but those that warm up."""
    # By name: a directory that was given may hold other files of earlier runs.
    recorded = read_timelines([folder / f"timeline-rank{rank}.json" for rank in range(ranks)])
    return total(analyse(timeline).over(WARM_UP_STEPS + 1) for timeline in recorded).hidden

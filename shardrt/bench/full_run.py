"""``shardrt bench all``: one scenario after the other, into one document of plain JSON values.

The document is what everything is shown from: tables, Markdown and the page. Who or what could not take part is in it
with the reason.
"""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

import shardrt
from shardrt.bench.contest import WARM_UP_STEPS
from shardrt.bench.link import require_tools
from shardrt.bench.overlap import NO_LINK
from shardrt.bench.scenario_report import measure_scenario
from shardrt.bench.scenarios import SCENARIOS, Scenario, ScenarioSettings, find_scenarios, ways_of
from shardrt.bench.shapes import SIZES
from shardrt.bench.shard import missing_peers
from shardrt.bench.ways import ONE_HOST, Way, backends_here
from shardrt.errors import ConfigError, ShardrtError, UnsupportedError
from shardrt.registry.nearness import did_you_mean

DEFAULT_STEPS = 2
DEFAULT_ROUNDS = 2
_ROUNDS_ARE_FOR = DEFAULT_ROUNDS * (WARM_UP_STEPS + DEFAULT_STEPS)
_SMALL = 0.15
"""How long the small model takes, in times of the other: most of it is starting and building."""
_NETWORK_PASSED_BY = "two emulated hosts have one memory, so its bytes would not cross the link"


def _tuple(given: Iterable[str]) -> tuple[str, ...]:
    return tuple(given)


@attrs.frozen(kw_only=True)
class FullSettings:
    """What a full run measures.

    Example:
        >>> from shardrt.bench.full_run import FullSettings
        >>> FullSettings(size="60m")
        Traceback (most recent call last):
        shardrt.errors.ConfigError: unknown size '60m'; sizes: small, 40m; did you mean '40m'?
    """

    size: str = "40m"
    steps: int = DEFAULT_STEPS
    rounds: int = DEFAULT_ROUNDS
    scenarios: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    """Nothing is all."""
    backends: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    """For ours; nothing is all that can run here."""
    only: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    """Some contestants, see :func:`shardrt.bench.scenarios.ways_of`."""
    everybody: bool = False
    """Ask everybody in every scenario."""

    def __attrs_post_init__(self) -> None:
        if self.size not in SIZES:
            raise ConfigError(f"unknown size {self.size!r}; sizes: {', '.join(SIZES)}{did_you_mean(self.size, SIZES)}")
        find_scenarios(self.scenarios)
        ways_of(SCENARIOS["loopback-2"], (), only=self.only)
        if not backends_here(self.backends)[0]:
            raise ConfigError(
                f"none of the backends can run here: {'; '.join(backends_here(self.backends)[1].values())}"
            )


@attrs.frozen(kw_only=True)
class Planned:
    """A scenario that will be measured, or why not."""

    scenario: Scenario
    settings: ScenarioSettings
    missing: Mapping[str, str]
    """Contestants that were asked for but cannot take part, by name, and why."""
    not_asked: tuple[str, ...]
    """Contestants that the scenario leaves out."""
    left_out: str = ""

    @property
    def minutes(self) -> float:
        """About how long it takes."""
        usual = len(ways_of(self.scenario, ["gloo"])) + 1
        share = (len(self.settings.ways) + 1) / usual
        steps = self.settings.rounds * (WARM_UP_STEPS + self.settings.steps) / _ROUNDS_ARE_FOR
        small = _SMALL if self.settings.size.endswith("small") else 1.0
        return 0.0 if self.left_out else self.scenario.minutes * share * steps * small


def plan_run(settings: FullSettings) -> list[Planned]:
    """Everything that was asked for, in order.

    Example:
        >>> from shardrt.bench.full_run import FullSettings, plan_run
        >>> asked = FullSettings(scenarios=["many-small"], backends=["gloo"], only=["zero1", "ddp_torch_zero"])
        >>> [(one.scenario.name, one.settings.size, len(one.settings.ways)) for one in plan_run(asked)]
        [('many-small', 'many-40m', 6)]
    """
    backends, lacking = backends_here(settings.backends)
    try:
        require_tools()
        no_link = ""
    except UnsupportedError as error:
        no_link = str(error).replace(", or measure on loopback with --link none", "")
    return [_planned(scenario, settings, backends, lacking, no_link) for scenario in find_scenarios(settings.scenarios)]


def _planned(
    scenario: Scenario, settings: FullSettings, backends: Sequence[str], lacking: Mapping[str, str], no_link: str
) -> Planned:
    linked = scenario.link != NO_LINK
    reasons = missing_peers()
    everywhere = (*backends, *lacking)
    asked = ways_of(scenario, everywhere, only=settings.only, everybody=settings.everybody)
    missing = {}
    for way in asked:
        reason = reasons.get(way.name) or (lacking.get(way.backend) if way.is_ours else None)
        if linked and way.is_ours and way.backend in ONE_HOST:
            reason = f"{way.backend}: {_NETWORK_PASSED_BY}"
        if reason:
            missing[way.name] = reason
    ways = [way.name for way in asked if way.name not in missing]
    possible = ways_of(scenario, everywhere, everybody=True)
    only_gloo = linked and not any(Way.parse(name).is_ours for name in ways)
    reason = no_link if linked else ""
    if only_gloo and not reason and not settings.only:
        reason = "none of the chosen backends crosses a network"
    return Planned(
        scenario=scenario,
        settings=ScenarioSettings(
            ranks=scenario.ranks,
            steps=settings.steps,
            rounds=settings.rounds,
            size=scenario.size(settings.size),
            link=scenario.link,
            bucket_mb=scenario.bucket_mb,
            ways=tuple(ways),
        ),
        missing=missing,
        not_asked=tuple(way.name for way in possible if way not in asked),
        left_out=reason,
    )


@attrs.frozen(kw_only=True)
class Progress:
    """How far a run has come."""

    number: int
    """Of the scenario, from 1."""
    count: int
    title: str
    doing: str
    """Whose step was taken last."""
    share: float
    """Of everything, from 0 to 1."""
    seconds_left: float


OnProgress = Callable[[Progress], None]


def measure_all(
    settings: FullSettings,
    *,
    command: str = "",
    on_progress: OnProgress | None = None,
    so_far: Callable[[dict[str, Any]], None] | None = None,
    patience: float = 300.0,
) -> dict[str, Any]:
    """Measure every scenario that is possible here; a scenario that fails is told of, and the others still run.

    ``so_far`` gets the document after each scenario: a run that is ended early has not measured in vain.
    """
    started = time.monotonic()
    plan = plan_run(settings)
    scenarios: list[dict[str, Any]] = []
    backends, lacking = backends_here(settings.backends)
    here = about_here()

    def document() -> dict[str, Any]:
        return {
            "kind": DOCUMENT_KIND,
            **here,
            "command": command,
            "date": datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "size": settings.size,
            "steps": settings.steps,
            "rounds": settings.rounds,
            "backends": list(backends),
            "backends_missing": lacking,
            "scenarios": scenarios,
            "seconds": time.monotonic() - started,
        }

    pace = Pace(minutes=tuple(one.minutes for one in plan))
    for number, planned in enumerate(plan):
        tell = _telling(planned, number, len(plan), pace, started, on_progress)
        tell("starting", 0)
        scenarios.append(_measure(planned, tell, patience))
        if so_far is not None:
            so_far(document())
    return document()


DOCUMENT_KIND = "shardrt bench all, 1"
"""Says what a document is, and in which version."""

_Tell = Callable[[str, int], None]


def _telling(
    planned: Planned, number: int, count: int, pace: Pace, started: float, on_progress: OnProgress | None
) -> _Tell:
    def tell(doing: str, done: int) -> None:
        if on_progress is None:
            return
        steps = max(planned.settings.all_steps, 1)
        share, left = pace.look(number, done / steps, time.monotonic() - started)
        on_progress(
            Progress(
                number=number + 1,
                count=count,
                title=planned.scenario.title,
                doing=doing,
                share=share,
                seconds_left=left,
            )
        )

    return tell


def _measure(planned: Planned, tell: _Tell, patience: float) -> dict[str, Any]:
    scenario = planned.scenario
    around = {
        "missing": _named(planned.missing),
        "not_asked": [{"name": name, "label": Way.parse(name).label} for name in planned.not_asked],
    }
    named = {"name": scenario.name, "title": scenario.title, "about": scenario.about, **around}
    if planned.left_out:
        return {"state": "left out", "reason": planned.left_out, **named}
    labels = {**planned.settings.contestants, "compute": "computing alone"}

    def on_event(rank: int, event: Any) -> None:
        if rank == 0:
            tell(labels[event["contestant"]], event["done"])

    try:
        report = measure_scenario(scenario, planned.settings, on_event=on_event, patience=patience)
    except UnsupportedError as error:
        return {"state": "left out", "reason": str(error), **named}
    except ShardrtError as error:
        return {"state": "failed", "reason": str(error), **named}
    missing = _named({**planned.missing, **report.refused})
    return {"state": "measured", **report.to_json(), **around, "missing": missing}


def _named(reasons: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "label": Way.parse(name).label, "reason": why} for name, why in reasons.items()]


@attrs.frozen(kw_only=True)
class Pace:
    """How much is done and left, from what scenarios are expected to take and what those so far really took.

    Example:
        >>> from shardrt.bench.full_run import Pace
        >>> pace = Pace(minutes=(1.0, 3.0))
        >>> pace.look(0, 0.0, 0.0)
        (0.0, 240.0)
        >>> pace.look(1, 0.0, 120.0)  # the first one took twice as long as expected
        (0.25, 360.0)
    """

    minutes: tuple[float, ...]

    def look(self, number: int, share: float, elapsed: float) -> tuple[float, float]:
        """The share of everything that is done, and seconds left, in the middle of a scenario."""
        whole = sum(self.minutes)
        if whole <= 0:
            return 1.0, 0.0
        done = sum(self.minutes[:number]) + min(share, 1.0) * self.minutes[number]
        if done < 0.02 * whole:  # too early to tell
            return done / whole, 60 * (whole - done)
        return done / whole, elapsed / done * (whole - done)


def about_here() -> dict[str, Any]:
    """The machine and the versions, without names of hosts or people.

    Example:
        >>> from shardrt.bench.full_run import about_here
        >>> sorted(about_here())
        ['deepspeed', 'machine', 'python', 'shardrt', 'system', 'torch']
    """
    return {
        "shardrt": shardrt.__version__,
        "torch": _version("torch"),
        "deepspeed": _version("deepspeed"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": _machine(),
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = f"{_cpu_model()}, {cores} core{'s' if cores != 1 else ''}"
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return told
    return f"{told}, {memory / 1e9:.0f} GB"


def _cpu_model() -> str:
    table = Path("/proc/cpuinfo")
    for line in table.read_text(encoding="utf-8", errors="replace").splitlines() if table.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()

"""How much of the communication was hidden: from the spans of each rank to a few figures per step.

Note [Hidden]: *communication* is the time in which at least one operation of a rank was under way. *Waiting* is when
its trainer waited for one, or was inside ``step`` and not updating in that very thread. *Exposed* is when both were
the case, and the share hidden is what is left: ``1 - exposed / communication``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from shardrt.errors import ConfigError
from shardrt.timeline.intervals import Stretch, difference, intersection, lengths_within, union
from shardrt.timeline.reading import RankTimeline, Span

OPERATION_LANES = ("reduce", "gather", "other")
_WORK = ("forward", "backward", "forward and backward")


@attrs.frozen(kw_only=True)
class Figures:
    """Microseconds, summed over some steps of one rank or of several.

    Example:
        >>> from shardrt.timeline.analysis import Figures
        >>> one = Figures(steps=1, duration=100, communication=50, exposed=10)
        >>> (one + one).steps, one.hidden
        (2, 0.8)
    """

    steps: int = 0
    duration: int = 0
    communication: int = 0
    reduce: int = 0
    gather: int = 0
    waited: int = 0
    exposed: int = 0

    @property
    def hidden(self) -> float | None:
        """The share of communication that nobody waited for; None without communication."""
        return 1 - self.exposed / self.communication if self.communication else None

    def __add__(self, other: Figures) -> Figures:
        names = [field.name for field in attrs.fields(Figures)]
        return Figures(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def to_json(self) -> dict[str, Any]:
        """Milliseconds per step and the share hidden. Without steps they are milliseconds of the whole recording."""
        per = {
            f"{field.name}_ms": round(getattr(self, field.name) / max(self.steps, 1) / 1e3, 3)
            for field in attrs.fields(Figures)
            if field.name != "steps"
        }
        return {"steps": self.steps, **per, "hidden": None if self.hidden is None else round(self.hidden, 4)}


@attrs.frozen(kw_only=True)
class RankAnalysis:
    """One rank's steps, and what each cost."""

    timeline: RankTimeline
    windows: tuple[Stretch, ...]
    """One stretch per step, from the end of the one before; without steps, the whole recording."""
    has_steps: bool
    figures: tuple[Figures, ...]
    """One per window."""
    exposed: tuple[Stretch, ...]
    """When the trainer waited for communication."""

    @property
    def rank(self) -> int:
        """Which rank."""
        return self.timeline.rank

    def over(self, first: int, last: int | None = None) -> Figures:
        """The sum over steps, which are counted from 1 and include the last."""
        return total(self.figures[first - 1 : last])


def total(figures: Iterable[Figures]) -> Figures:
    """Their sum.

    Example:
        >>> from shardrt.timeline.analysis import Figures, total
        >>> total([Figures(steps=1, duration=2), Figures(steps=1, duration=3)]).duration
        5
    """
    return sum(figures, start=Figures())


def analyse(timeline: RankTimeline) -> RankAnalysis:
    """The figures of one rank; see Note [Hidden].

    Example:
        >>> from pathlib import Path
        >>> from shardrt.timeline.analysis import analyse
        >>> from shardrt.timeline.reading import RankTimeline, Span
        >>> spans = (
        ...     Span("trainer", "backward", 0, 60, "MainThread", {}),
        ...     Span("reduce", "reduce_scatter", 20, 80, "shardrt-gloo-0", {}),
        ...     Span("trainer", "step", 60, 100, "MainThread", {}),
        ...     Span("update", "update", 80, 100, "MainThread", {}),
        ... )
        >>> recorded = RankTimeline(
        ...     rank=0, world_size=1, host="", runtime=1, about={}, dropped=0, spans=spans, path=Path("x")
        ... )
        >>> [found] = analyse(recorded).figures
        >>> found.communication, found.exposed, round(found.hidden, 2)
        (60, 20, 0.67)
    """
    spans = timeline.spans
    windows = step_windows(spans)
    has_steps = bool(windows)
    if not windows and spans:
        windows = [(min(span.start for span in spans), max(span.end for span in spans))]
    sets = {lane: _covered(span for span in spans if span.lane == lane) for lane in OPERATION_LANES}
    communication = union(stretch for found in sets.values() for stretch in found)
    waiting = waiting_of(spans)
    exposed = intersection(communication, waiting)
    columns = {
        "communication": communication,
        "reduce": sets["reduce"],
        "gather": sets["gather"],
        "waited": waiting,
        "exposed": exposed,
    }
    measured = {name: lengths_within(found, windows) for name, found in columns.items()}
    figures = tuple(
        Figures(steps=int(has_steps), duration=end - start, **{name: found[index] for name, found in measured.items()})
        for index, (start, end) in enumerate(windows)
    )
    return RankAnalysis(
        timeline=timeline, windows=tuple(windows), has_steps=has_steps, figures=figures, exposed=tuple(exposed)
    )


def waiting_of(spans: Sequence[Span]) -> list[Stretch]:
    """When the trainer waited: its waits, and its ``step`` where it did not update in the same thread."""
    trainer = [span for span in spans if span.lane == "trainer"]
    waiting = [(span.start, span.end) for span in trainer if span.name == "wait"]
    for thread in {span.thread for span in trainer if span.name == "step"}:
        stepping = _covered(span for span in trainer if span.name == "step" and span.thread == thread)
        updating = _covered(
            span for span in spans if (span.lane, span.name, span.thread) == ("update", "update", thread)
        )
        waiting += difference(stepping, updating)
    return union(waiting)


def step_windows(spans: Sequence[Span]) -> list[Stretch]:
    """One stretch per training step. Optimizers that step one after the other, with the same number, make one step.

    Example:
        >>> from shardrt.timeline.analysis import step_windows
        >>> from shardrt.timeline.reading import Span
        >>> steps = [(5, 7, {"number": 1}), (7, 8, {"number": 1}), (14, 16, {"number": 2})]
        >>> spans = [Span("trainer", "step", start, end, "MainThread", details) for start, end, details in steps]
        >>> step_windows([Span("trainer", "backward", 0, 5, "MainThread", {}), *spans])
        [(0, 8), (8, 16)]
    """
    trainer = [span for span in spans if span.lane == "trainer"]
    steps = sorted((span for span in trainer if span.name == "step"), key=lambda span: (span.end, span.start))
    if not steps:
        return []
    # Setting up comes before. Where neither forward nor backward is recorded, nothing tells when it ended.
    work = [span for span in trainer if span.name in _WORK]
    begun = min(span.start for span in ([*work, *steps] if work else spans))
    windows: list[Stretch] = []
    for index, span in enumerate(steps):
        number = span.details.get("number")
        follows = steps[index + 1].details.get("number") if index + 1 < len(steps) else None
        if (number is None or number != follows) and span.end > begun:
            windows.append((begun, span.end))
            begun = span.end
    return windows


def chosen_steps(analyses: Sequence[RankAnalysis], wanted: tuple[int | None, int | None] | None) -> tuple[int, int]:
    """First and last step to look at; by default all but the first, in which everything warms up."""
    fewest = min((len(one.windows) for one in analyses), default=0)
    if wanted is None:
        return (2 if fewest > 1 else 1), max(fewest, 1)
    first, last = wanted[0] or 1, wanted[1] or fewest
    if not all(one.has_steps for one in analyses):
        raise ConfigError("no steps were recorded on some rank, so none can be chosen; leave --steps out")
    if not 1 <= first <= last <= fewest:
        asked = f"{wanted[0] or ''}:{wanted[1] or ''}"
        raise ConfigError(f"steps {asked} are not there; every rank has steps 1 to {fewest}")
    return first, last


def notes_on(analyses: Sequence[RankAnalysis]) -> list[str]:
    """What a reader of the figures should know about the recording."""
    notes = []
    there = [one.rank for one in analyses]
    world_size = analyses[0].timeline.world_size
    if len(there) < world_size:
        missing = ", ".join(str(rank) for rank in range(min(world_size, 4096)) if rank not in set(there))
        notes.append(f"The run had {world_size} ranks; no file of: {missing[:200]}.")
    dropped = sum(one.timeline.dropped for one in analyses)
    if dropped:
        notes.append(f"{dropped:,} spans came after the limit and were not recorded: the end of the run is missing.")
    if not all(one.has_steps for one in analyses):
        notes.append("No steps were recorded on some rank: its figures are for the whole recording.")
    elif len({len(one.windows) for one in analyses}) > 1:
        notes.append("Ranks recorded different numbers of steps; those that all have are shown.")
    whole = [(one.windows[0][0], one.windows[-1][1]) for one in analyses if one.windows]
    if whole and max(start for start, _ in whole) >= min(end for _, end in whole):
        notes.append("Ranks did not record at the same time: clocks of hosts differ, or these are different runs.")
    return notes


def _covered(spans: Iterable[Span]) -> list[Stretch]:
    return union((span.start, span.end) for span in spans)

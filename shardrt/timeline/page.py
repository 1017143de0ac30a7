"""The lanes as one HTML page that needs nothing else: no network, no other file.

Note [Hostile names]: names and details come from files. They are put into the page as JSON in which no ``<`` is left,
inside an element that is data and not script; the page's own script writes them as text only; and the page forbids
itself every script but that one, by its hash.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from shardrt.timeline.analysis import RankAnalysis
from shardrt.timeline.reading import Span
from shardrt.timeline.recorder import LANES

MOST_DRAWN = 300_000
"""Spans in a page. A browser draws as many smoothly; more only make the file heavy."""


def render_page(
    analyses: Sequence[RankAnalysis],
    *,
    steps: tuple[int, int],
    notes: Sequence[str] = (),
    most_drawn: int = MOST_DRAWN,
) -> str:
    """The page, with figures over some steps chosen; others can be chosen in it."""
    data, title = _PageData(analyses, steps, notes, most_drawn).build(), _title(analyses)
    style, script = _part("page.css"), _script()
    parts = {
        "title": html.escape(title),
        "style": style,
        "style-hash": _hash(style),
        "script": script,
        "script-hash": _hash(script),
        "data": embedded(data),
    }
    # In one pass: what is put in is never looked at for further places.
    return re.sub(r"@([a-z-]+)@", lambda found: parts[found[1]], _part("page.html"))


def embedded(value: Any) -> str:
    """JSON that can stand inside a script element: nothing in it ends the element or begins another.

    Example:
        >>> from shardrt.timeline.page import embedded
        >>> embedded({"name": "</script><script>alert(1)"})
        '{"name":"\\\\u003c/script\\\\u003e\\\\u003cscript\\\\u003ealert(1)"}'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


class _PageData:
    """Collects texts once and spans as columns, which keeps the page of a long run small."""

    def __init__(
        self, analyses: Sequence[RankAnalysis], steps: tuple[int, int], notes: Sequence[str], most_drawn: int
    ) -> None:
        self._analyses = analyses
        self._steps = steps
        self._notes = list(notes)
        self._names: dict[str, int] = {}
        self._threads: dict[str, int] = {}
        self._details: dict[str, int] = {}
        self._begun = min((one.windows[0][0] for one in analyses if one.windows), default=0)
        # Setting up comes before the first step; it is drawn as well.
        self._begun = min([self._begun, *(one.timeline.spans[0].start for one in analyses if one.timeline.spans)])
        self._from, self._until = self._drawn_stretch(most_drawn)

    def build(self) -> dict[str, Any]:
        ranks = [self._rank(one) for one in self._analyses]
        last = max((span.end for one in self._analyses for span in one.timeline.spans), default=self._begun)
        return {
            "about": _about(self._analyses),
            "notes": self._notes,
            "lanes": LANES,
            "first": self._steps[0],
            "last": self._steps[1],
            "steps": all(one.has_steps for one in self._analyses),
            "end": last - self._begun,
            "ranks": ranks,
            "names": list(self._names),
            "threads": list(self._threads),
            "details": [json.loads(text) for text in self._details],
        }

    def _drawn_stretch(self, most: int) -> tuple[int, int | None]:
        count = sum(len(one.timeline.spans) for one in self._analyses)
        if count <= most:
            return self._begun, None
        begin = min((one.windows[self._steps[0] - 1][0] for one in self._analyses if one.windows), default=0)
        starts = sorted(span.start for one in self._analyses for span in one.timeline.spans if span.end >= begin)
        until = starts[most] if len(starts) > most else None
        self._notes.append(
            f"There are {count:,} spans, too many for a page: {min(most, len(starts)):,} from step {self._steps[0]} on "
            "are drawn. The figures are of all; choose others to be drawn with --steps."
        )
        return begin, until

    def _rank(self, one: RankAnalysis) -> dict[str, Any]:
        drawn = [
            span
            for span in one.timeline.spans
            if span.end >= self._from and (self._until is None or span.start < self._until)
        ]
        rows = []
        for lane in LANES:
            spans = [span for span in drawn if span.lane == lane and (lane, span.name) != ("trainer", "wait")]
            rows += [self._row(lane, row) for row in _side_by_side(spans)]
        waits = [span for span in drawn if (span.lane, span.name) == ("trainer", "wait")]
        windows = one.windows or ((self._begun, self._begun + 1),)
        figures = [
            [each.duration, each.communication, each.reduce, each.gather, each.waited, each.exposed]
            for each in one.figures
        ]
        return {
            "rank": one.rank,
            "host": one.timeline.host,
            "windows": [[start - self._begun, end - self._begun] for start, end in windows],
            "figures": figures or [[0] * 6],
            "exposed": [[start - self._begun, end - self._begun] for start, end in one.exposed],
            "rows": rows,
            "waits": [self._row("trainer", row) for row in _side_by_side(waits)],
        }

    def _row(self, lane: str, spans: Sequence[Span]) -> dict[str, Any]:
        return {
            "lane": lane,
            "start": [span.start - self._begun for span in spans],
            "span": [span.end - span.start for span in spans],
            "name": [_number(self._names, span.name) for span in spans],
            "thread": [_number(self._threads, span.thread) for span in spans],
            "info": [_number(self._details, json.dumps(list(span.details.items()))) for span in spans],
        }


def _side_by_side(spans: Iterable[Span]) -> list[list[Span]]:
    """Rows in which no span covers another; spans come in order of their start."""
    rows: list[list[Span]] = []
    for span in spans:
        for row in rows:
            if row[-1].end <= span.start:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows


def _number(known: dict[str, int], text: str) -> int:
    return known.setdefault(text, len(known))


def _about(analyses: Sequence[RankAnalysis]) -> list[tuple[str, str]]:
    first = analyses[0].timeline
    found = [(key, str(value["name"])) for key, value in first.about.items() if isinstance(value, dict)]
    hosts = {one.timeline.host for one in analyses}
    found.append(("ranks", str(first.world_size)))
    found.append(("hosts" if len(hosts) > 1 else "host", str(len(hosts)) if len(hosts) > 1 else min(hosts)))
    begun = min((one.windows[0][0] for one in analyses if one.windows), default=0)
    when = datetime.datetime.fromtimestamp(begun / 1e6, tz=datetime.timezone.utc)
    return [*found, ("recorded", when.strftime("%Y-%m-%d %H:%M:%S UTC"))]


def _title(analyses: Sequence[RankAnalysis]) -> str:
    schedule = analyses[0].timeline.about.get("schedule")
    name = schedule["name"] if isinstance(schedule, dict) else "timeline"
    return f"shardrt timeline: {name}, {analyses[0].timeline.world_size} ranks"


def _script() -> str:
    parts = "\n".join(_part(f"page_{name}.js") for name in ("figures", "drawing", "moving"))
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _part(name: str) -> str:
    return files("shardrt.timeline").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode()}'"

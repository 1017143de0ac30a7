"""A timeline as a file of Chrome trace events, which Perfetto and chrome://tracing open as it is.

Note [Whole microseconds]: times are whole microseconds since 1970. Readers take numbers as doubles, which hold these
exactly, so spans that touch do not overlap by rounding, and files of several ranks and hosts line up as far as their
wall clocks agree.

Note [Rows]: a viewer draws one row per thread number and drops spans that overlap there without one being inside the
other. Operations of two communicators may, so a lane has as many rows as its spans need; most have one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from shardrt.timeline.recorder import LANES, Recorded

if TYPE_CHECKING:
    from shardrt.timeline.recorder import Timeline

FORMAT = "shardrt-timeline"
VERSION = 1
ROWS_PER_LANE = 100
"""Thread numbers from one lane to the next."""


@attrs.define
class _Row:
    """What is still open in a row, the outermost first."""

    open_until: list[int] = attrs.field(factory=list)

    def takes(self, start: int, end: int) -> bool:
        while self.open_until and self.open_until[-1] <= start:
            self.open_until.pop()
        if self.open_until and self.open_until[-1] < end:
            return False
        self.open_until.append(end)
        return True


def write_chrome(timeline: Timeline, path: Path) -> None:
    """Write the file beside its final name and rename it, so that nobody ever reads half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms",\n"otherData": ')
            spans, dropped = timeline.spans(), timeline.dropped
            encode = json.JSONEncoder(allow_nan=False).encode  # made once: json.dumps would make one per event
            file.write(encode(_about(timeline, dropped)))
            file.write(',\n"traceEvents": [\n')
            for index, event in enumerate(_events(timeline, spans)):
                file.write(",\n" if index else "")
                file.write(encode(event))
            file.write("\n]}\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _about(timeline: Timeline, dropped: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "rank": timeline.rank,
        "world_size": timeline.world_size,
        "host": timeline.host,
        "recording_started_us": round(timeline.clock.wall * 1e6),
        "spans_dropped": dropped,
        **{key: _plain(value) for key, value in timeline.about.items()},
    }


def _events(timeline: Timeline, spans: list[Recorded]) -> Iterator[dict[str, Any]]:
    rank = timeline.rank
    yield _metadata("process_name", rank, 0, name=f"rank {rank}")
    yield _metadata("process_sort_index", rank, 0, sort_index=rank)
    rows: dict[str, list[_Row]] = {lane: [] for lane in LANES}
    for start, end, lane, name, thread, details in _in_order(timeline, spans):
        index = _row(rows[lane], start, end)
        yield {
            "ph": "X",
            "pid": rank,
            "tid": _thread_number(lane, index),
            "ts": start,
            "dur": end - start,
            "name": name,
            "cat": lane,
            "args": {"thread": thread, **{key: _plain(value) for key, value in details.items()}},
        }
    for lane, used in rows.items():
        for index in range(max(len(used), 1)):
            number = _thread_number(lane, index)
            yield _metadata("thread_name", rank, number, name=lane if index == 0 else f"{lane} ({index + 1})")
            yield _metadata("thread_sort_index", rank, number, sort_index=number)


def _in_order(timeline: Timeline, spans: list[Recorded]) -> list[tuple[int, int, str, str, str, Any]]:
    """By start, and what is around others before these."""
    found = []
    for lane, name, started, ended, thread, details in spans:
        if math.isfinite(started) and math.isfinite(ended):
            start = timeline.clock.microseconds(started)
            found.append((start, max(start, timeline.clock.microseconds(ended)), lane, str(name), thread, details))
    return sorted(found, key=lambda span: (span[0], -span[1]))


def _row(rows: list[_Row], start: int, end: int) -> int:
    for index, row in enumerate(rows):
        if row.takes(start, end):
            return index
    if len(rows) < ROWS_PER_LANE:
        rows.append(_Row([end]))
    return len(rows) - 1


def _thread_number(lane: str, row: int) -> int:
    return (LANES.index(lane) + 1) * ROWS_PER_LANE + row


def _metadata(kind: str, rank: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": arguments}


def _plain(value: Any) -> Any:
    """What JSON can hold; anything else as text, since no detail is worth losing the file for."""
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else str(value)

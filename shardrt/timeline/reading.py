"""Reading timelines back: files that anyone may have written, so everything in them is checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from shardrt.errors import ConfigError
from shardrt.timeline.chrome import FORMAT, VERSION
from shardrt.timeline.recorder import LANES

MOST_BYTES = 1 << 30
MOST_RANKS = 4096
_FILES = "timeline-rank*.json"
_NUMBERED = re.compile(r"timeline-rank(\d+)(?:-(\d+))?\.json\Z")
_LATEST = 2**53
"""Microseconds. Whole numbers up to here are the same in every reader of JSON; as a date it is in the year 2255."""
_MOST_DETAILS = 32
_LONGEST_TEXT = 300


@attrs.frozen
class Span:
    """One stretch of work or waiting; times are microseconds since 1970."""

    lane: str
    name: str
    start: int
    end: int
    thread: str
    details: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class RankTimeline:
    """Everything one rank recorded, in order of time."""

    rank: int
    world_size: int
    host: str
    runtime: int
    """Counts the runtimes of one process, from 1."""
    about: Mapping[str, Any]
    dropped: int
    spans: tuple[Span, ...]
    path: Path


def read_timelines(paths: Sequence[str | Path]) -> list[RankTimeline]:
    """The timelines in files and directories, by runtime and rank.

    Example:
        >>> import pathlib, tempfile
        >>> from shardrt.timeline import Timeline
        >>> from shardrt.timeline.reading import read_timelines
        >>> timeline = Timeline(rank=0, world_size=1)
        >>> timeline.span("reduce", "reduce_scatter", 1.0, 1.002, bytes=4096)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     timeline.write(pathlib.Path(folder, "timeline-rank0.json"))
        ...     [found] = read_timelines([folder])
        >>> found.spans[0].name, found.spans[0].end - found.spans[0].start
        ('reduce_scatter', 2000)
    """
    files = _files(paths)
    if len(files) > MOST_RANKS:
        raise ConfigError(f"{len(files):,} files are more than the {MOST_RANKS:,} that can be looked at; give fewer")
    found = sorted((read_timeline(file) for file in files), key=lambda one: (one.runtime, one.rank))
    _check_one_run(found)
    return found


def read_timeline(path: Path) -> RankTimeline:
    """The timeline in one file."""
    document = _document(path)
    other = document.get("otherData")
    if not isinstance(other, dict) or other.get("format") != FORMAT:
        raise _refused(path, "it was not recorded by shardrt (its otherData does not say so)")
    if other.get("version") != VERSION:
        raise _refused(path, f"it has format version {_short(other.get('version'))}, this shardrt reads {VERSION}")
    world_size = _whole(path, other, "world_size", least=1)
    rank = _whole(path, other, "rank", most=world_size - 1)
    events = document.get("traceEvents")
    if not isinstance(events, list):
        raise _refused(path, "it has no list of traceEvents")
    spans = [_span(path, index, event) for index, event in enumerate(events) if not _is_metadata(event)]
    known = ("format", "version", "rank", "world_size", "host", "runtime", "spans_dropped", "recording_started_us")
    return RankTimeline(
        rank=rank,
        world_size=world_size,
        host=_text(other.get("host", "")),
        runtime=_whole(path, other, "runtime", least=1, default=1),
        about=_details({key: value for key, value in other.items() if key not in known}),
        dropped=_whole(path, other, "spans_dropped", default=0),
        spans=tuple(sorted(spans, key=lambda span: (span.start, -span.end))),
        path=path,
    )


def _files(paths: Sequence[str | Path]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.glob(_FILES) if _NUMBERED.search(file.name))
            if not inside:
                raise ConfigError(
                    f"directory {str(path)!r} has no {_FILES}; record some with Runtime(timeline={str(path)!r})"
                )
            found.extend(inside)
        elif path.exists():
            found.append(path)
        else:
            raise ConfigError(
                f"{str(path)!r} does not exist; give timeline files, or a directory that a run recorded to"
            )
    return list(dict.fromkeys(file.resolve() for file in found))


def _document(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():  # a pipe would be waited for
            raise _refused(path, "it is not a regular file")
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise _refused(path, f"it has {size:,} bytes, more than the {MOST_BYTES:,} that are read")
        document = json.loads(path.read_bytes(), parse_constant=_not_a_number)
    except OSError as error:
        raise _refused(path, f"it cannot be read: {error}") from error
    except RecursionError as error:
        raise _refused(path, "it is nested too deeply") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise _refused(path, f"it is not valid JSON: {_short(str(error))}") from error
    if not isinstance(document, dict):
        raise _refused(path, f"it is a {type(document).__name__} and not an object with traceEvents")
    return document


def _not_a_number(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _is_metadata(event: object) -> bool:
    return isinstance(event, dict) and event.get("ph") == "M"


def _span(path: Path, index: int, event: object) -> Span:
    where = f"traceEvents[{index}]"
    if not isinstance(event, dict) or event.get("ph") != "X":
        raise _refused(path, f"{where} is no complete event ('ph': 'X'): {_short(event)}")
    lane, arguments = event.get("cat"), event.get("args", {})
    if not isinstance(lane, str) or lane not in LANES:
        raise _refused(path, f"{where} is in lane {_short(lane)}; lanes: {', '.join(LANES)}")
    if not isinstance(arguments, dict):
        raise _refused(path, f"{where} has args that are no object: {_short(arguments)}")
    start, duration = _time(path, where, event, "ts"), _time(path, where, event, "dur")
    details = _details({key: value for key, value in arguments.items() if key != "thread"})
    name, thread = _text(event.get("name", "")), _text(arguments.get("thread", ""))
    return Span(lane, name, start, start + duration, thread, details)


def _time(path: Path, where: str, event: dict[str, Any], key: str) -> int:
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LATEST:
        raise _refused(path, f"{where} has {key} = {_short(value)}; it must be microseconds from 0 to {_LATEST}")
    return round(value)


def _whole(
    path: Path, values: dict[str, Any], key: str, *, least: int = 0, most: int = _LATEST, default: int | None = None
) -> int:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _refused(path, f"its {key} is {_short(value)}; it must be a whole number from {least} to {most}")
    return value


def _details(given: dict[str, Any]) -> dict[str, Any]:
    """Details are shown and never computed with: long ones are cut, and whatever is not plain becomes text."""
    found: dict[str, Any] = {}
    for key, value in list(given.items())[:_MOST_DETAILS]:
        plain = value is None or (isinstance(value, (bool, int, float)) and abs(value) <= _LATEST)
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            found[_text(key)] = {_text(inner): _text(item) for inner, item in list(value.items())[:_MOST_DETAILS]}
        else:
            found[_text(key)] = value if plain else _text(value)
    return found


def _check_one_run(found: Sequence[RankTimeline]) -> None:
    seen: dict[tuple[int, int], RankTimeline] = {}
    for one in found:
        twin = seen.setdefault((one.runtime, one.rank), one)
        if twin is not one:
            raise ConfigError(
                f"{str(twin.path)!r} and {str(one.path)!r} are both of rank {one.rank}, so they are of different runs; "
                "give the files of one run"
            )
        first = next(other for other in found if other.runtime == one.runtime)
        if one.world_size != first.world_size:
            raise ConfigError(
                f"{str(first.path)!r} is of a run on {first.world_size} ranks and {str(one.path)!r} of one on "
                f"{one.world_size}; give the files of one run, or record into an empty directory"
            )


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{str(path)!r} is not a timeline that can be read: {why}; give files that shardrt has recorded")


def _text(value: object) -> str:
    text = value if isinstance(value, str) else _short(value)
    if not text.isprintable():  # control characters would reach a terminal, half surrogate pairs no file at all
        text = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"


def _short(value: object) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # a nested list, or an integer of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:79] + "…"

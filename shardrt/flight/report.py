"""A rank's report of a failed wait: one JSON file, written once, and checked when it is read."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from shardrt.errors import ConfigError
from shardrt.flight.recorder import FlightRecorder

VARIABLE = "SHARDRT_HANG_DIR"
FORMAT = "shardrt-hang"
VERSION = 1
NAME = re.compile(r"rank-(\d{5,})-of-(\d{5,})\.json")
_LARGEST = 16 * 2**20
_STATES = ("queued", "under way", "done", "failed")


def reports_directory(given: str | None) -> Path | None:
    """Where reports go: the directory that was given, else the variable's, else None. It is there afterwards.

    Example:
        >>> import tempfile
        >>> from shardrt.flight.report import reports_directory
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     reports_directory(f"{folder}/hangs").name
        'hangs'
    """
    name = given or os.environ.get(VARIABLE, "").strip()
    if not name:
        return None
    origin = f"hang_reports={name!r}" if given else f"{VARIABLE}={name!r}"
    # The run may change its working directory before it fails.
    directory = Path(name).expanduser().absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"{origin}: no file can be written there ({error}); give a directory that this rank can write to"
        ) from error
    return directory


def report_name(rank: int, world_size: int) -> str:
    """What a rank's report is called.

    Example:
        >>> from shardrt.flight.report import report_name
        >>> report_name(2, 4)
        'rank-00002-of-00004.json'
    """
    return f"rank-{rank:05d}-of-{world_size:05d}.json"


def make_report(
    flight: FlightRecorder,
    error: BaseException,
    *,
    peers: Mapping[int, Any],
    about: Mapping[str, Any],
    elsewhere: bool = False,
) -> dict[str, Any]:
    """Everything that this rank knows at this moment, as plain JSON values.

    ``elsewhere``: it heard of another's failure while it was not in the runtime at all.
    """
    message = str(error).partition("\n")[0]
    return {
        "format": FORMAT,
        "version": VERSION,
        "rank": flight.rank,
        "world_size": flight.world_size,
        "time": time.time(),
        "elsewhere": elsewhere,
        "attempt": os.environ.get("TORCHELASTIC_RESTART_COUNT", ""),
        "about": dict(about),
        "error": {"type": type(error).__name__, "message": message},
        "own": flight.summary(),
        "operations": flight.to_json(),
        "peers": {str(rank): dict(beat) for rank, beat in peers.items()},
        "stacks": stacks(),
    }


def stacks() -> str:
    """Where every thread of this process is, as text.

    Example:
        >>> from shardrt.flight.report import stacks
        >>> "MainThread" in stacks()
        True
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        lines = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(ident, ident)}:\n{lines}")
    return "\n".join(parts)


def write_report(directory: Path, report: Mapping[str, Any]) -> Path:
    """Write it so that it appears wholly or not at all, in place of an earlier one of the same rank."""
    path = directory / report_name(report["rank"], report["world_size"])
    descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1, default=str)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise
    return path


@attrs.frozen(kw_only=True)
class HangReport:
    """A report as it was read, with nothing in it that was not checked."""

    path: Path
    rank: int
    world_size: int
    time: float
    attempt: str
    elsewhere: bool
    """Whether the rank was outside of the runtime, and only its heartbeat heard of the failure."""
    about: Mapping[str, Any]
    error_type: str
    error: str
    own: Mapping[str, Any]
    operations: tuple[Mapping[str, Any], ...]
    """In the order in which they were issued."""
    peers: Mapping[int, Mapping[str, Any]]
    """The last words of other ranks, as this one found them."""
    stacks: str


def read_report(path: Path) -> HangReport:
    """Read one file. Whatever is not a report of ours is a :class:`~shardrt.errors.ConfigError` that says why.

    Example:
        >>> import pathlib, tempfile
        >>> from shardrt.flight import FlightRecorder
        >>> from shardrt.flight.report import make_report, read_report, write_report
        >>> flight = FlightRecorder(rank=1, world_size=2)
        >>> report = make_report(flight, TimeoutError("too long"), peers={}, about={"backend": "gloo"})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = read_report(write_report(pathlib.Path(folder), report))
        >>> found.rank, found.error_type, found.error
        (1, 'TimeoutError', 'too long')
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise _refused(path, f"it has more than {_LARGEST // 2**20} MiB")
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refused(path, f"it cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"it is no JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _refused(path, f'it is JSON, but has no "format": "{FORMAT}"')
    if document.get("version") != VERSION:
        raise _refused(path, f"it has format version {document.get('version')!r}, this shardrt reads {VERSION}")
    rank, world_size = _whole(path, document, "rank"), _whole(path, document, "world_size")
    if not 0 <= rank < world_size:
        raise _refused(path, f"it says to be of rank {rank} of {world_size}")
    failure = _mapping(path, document, "error")
    operations = document.get("operations")
    if not isinstance(operations, list):
        raise _refused(path, "its operations are no list")
    return HangReport(
        path=path,
        rank=rank,
        world_size=world_size,
        time=_number(path, document, "time"),
        attempt=str(document.get("attempt", "")),
        elsewhere=document.get("elsewhere") is True,
        about=_mapping(path, document, "about"),
        error_type=str(failure.get("type", "")),
        error=str(failure.get("message", "")),
        own=_beat(path, document.get("own")),
        operations=tuple(_operation(path, one) for one in operations),
        peers=_peers(path, document, world_size),
        stacks=str(document.get("stacks", "")),
    )


def _peers(path: Path, document: Mapping[str, Any], world_size: int) -> dict[int, Mapping[str, Any]]:
    found: dict[int, Mapping[str, Any]] = {}
    for name, beat in _mapping(path, document, "peers").items():
        if not (name.isascii() and name.isdigit() and int(name) < world_size):
            raise _refused(path, f"it tells of a rank {name!r} of {world_size}")
        found[int(name)] = _beat(path, beat)
    return found


def _beat(path: Path, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _refused(path, "a rank's last words are no mapping")
    _number(path, value, "time")
    for name in ("finished", "failed"):
        if value.get(name) is not None:
            _operation(path, value[name])
    for name in ("under_way", "queued"):
        if not isinstance(value.get(name) or [], list):
            raise _refused(path, f"{name} is no list")
        for one in value.get(name) or []:
            _operation(path, one)
    return value


def _operation(path: Path, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise _refused(path, "an operation has no kind")
    for name in ("communicator", "number"):
        _whole(path, value, name)
    if "state" in value and value["state"] not in _STATES:
        raise _refused(path, f"an operation is in state {value['state']!r}; there are {', '.join(_STATES)}")
    if not isinstance(value.get("waits_for", []), list):
        raise _refused(path, "waits_for is no list")
    for name in ("issued", "started", "finished"):
        if value.get(name) is not None:
            _number(path, value, name)
    return value


def _whole(path: Path, values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refused(path, f"{key} is {value!r} and no whole number")
    return value


def _number(path: Path, values: Mapping[str, Any], key: str) -> float:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _refused(path, f"{key} is {value!r} and no number")
    return float(value)


def _mapping(path: Path, values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    if not isinstance(value, dict):
        raise _refused(path, f"{key} is no mapping")
    return value


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} is not a hang report of shardrt: {why}; give a directory of files like {report_name(0, 2)}"
    )

"""A runtime's timeline and the file it ends up in: chosen and tried at the start, written at the end, exactly once."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardrt.errors import ConfigError
from shardrt.timeline.recorder import Timeline

VARIABLE = "SHARDRT_TIMELINE"

_numbers: dict[tuple[Path, int], int] = {}
_numbering = threading.Lock()


def timeline_directory(given: str | None) -> Path | None:
    """The directory to record into: the one that was given, else the variable's, else None. It is there afterwards.

    Example:
        >>> import tempfile
        >>> from shardrt.timeline.recording import timeline_directory
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     timeline_directory(f"{folder}/run").name
        'run'
    """
    name = given or os.environ.get(VARIABLE, "").strip()
    if not name:
        return None
    origin = f"timeline={name!r}" if given else f"{VARIABLE}={name!r}"
    # The run may change its working directory before it ends.
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


class Recording:
    """A timeline that is written when the runtime closes, or when the interpreter ends if that never happens.

    Example:
        >>> import pathlib, tempfile
        >>> from shardrt.timeline.recording import Recording
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = Recording(pathlib.Path(folder), rank=0, world_size=1)
        ...     second = Recording(pathlib.Path(folder), rank=0, world_size=1)
        ...     first.close(), second.close()
        ...     sorted(path.name for path in pathlib.Path(folder).iterdir())
        (None, None)
        ['timeline-rank0-2.json', 'timeline-rank0.json']
    """

    def __init__(self, directory: Path, *, rank: int, world_size: int, about: Mapping[str, Any] | None = None) -> None:
        with _numbering:
            number = _numbers[directory, rank] = _numbers.get((directory, rank), 0) + 1
        self.path = directory / f"timeline-rank{rank}{'' if number == 1 else f'-{number}'}.json"
        self.timeline = Timeline(rank, world_size, about={"runtime": number, **(about or {})})
        self._closed = False
        atexit.register(self._leave)

    def close(self) -> str | None:
        """Write the file. A disk that is full by now must not end a run that is complete: says why, or None."""
        if self._closed:
            return None
        self._closed = True
        atexit.unregister(self._leave)
        try:
            self.timeline.write(self.path)
        except OSError as error:
            return str(error)
        return None

    def _leave(self) -> None:
        # Nothing recorded: the runtime was not completed.
        problem = self.close() if len(self.timeline) else None
        if problem is not None:
            sys.stderr.write(f"shardrt: {self.path} was not written: {problem}\n")

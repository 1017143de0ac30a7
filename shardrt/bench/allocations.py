"""Every byte that tensors of this process hold, as torch's own allocator tells it.

Note [Telling of allocations]: torch's allocator for the CPU can write a line for each block that it hands out or takes
back, whichever thread asks and whatever for; storages that are resized are among them. Two alternatives miss something:
``torch.profiler`` sees only the thread that started it, and not those that communicate; walking Python's objects sees
no tensor that only autograd or a kernel holds, and no peak. The switch is a variable of torch's library, for which
there is no function. The lines go to standard error, so that is a file meanwhile; whatever else was written there is
passed on in the end.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from shardrt.errors import UnsupportedError

_SWITCH = "FLAGS_caffe2_report_cpu_memory_usage"
_LEVEL = "FLAGS_caffe2_log_level"
_INFO = 0
_LINE = re.compile(rb"C10 (alloc|deleted) (\d+) bytes, total alloc \d+ bytes")
_UNKNOWN = b"Memory block of unknown size was allocated before"
"""What is freed but was there before anybody counted: left out."""


class Allocations:
    """What tensors hold now and held at most, above what they did when the counting began.

    Example:
        >>> from shardrt.bench.allocations import Allocations
        >>> counted = Allocations()
        >>> counted.note([b"C10 alloc 80 bytes, total alloc 99 bytes.", b"C10 deleted 30 bytes, total alloc 69 bytes."])
        >>> counted.live, counted.peak, counted.total
        (50, 80, 80)
    """

    def __init__(self, source: IO[bytes] | None = None) -> None:
        self._source = source
        self._rest = b""
        self._live = self._peak = self._total = 0
        self.others: list[bytes] = []
        """Lines that tell of something else."""

    def note(self, lines: Iterable[bytes]) -> None:
        """Add up what some lines say. Threads may write theirs in another order than they allocated in."""
        for line in lines:
            found = _LINE.search(line)
            if found is not None:
                self._live += int(found[2]) if found[1] == b"alloc" else -int(found[2])
                self._total += int(found[2]) if found[1] == b"alloc" else 0
                self._peak = max(self._peak, self._live)
            elif _UNKNOWN not in line:
                self.others.append(line)

    @property
    def live(self) -> int:
        """Bytes held now."""
        self._catch_up()
        return self._live

    @property
    def peak(self) -> int:
        """The most that was held since the last :meth:`begin`."""
        self._catch_up()
        return self._peak

    @property
    def total(self) -> int:
        """All that was handed out so far, whether or not it was given back."""
        self._catch_up()
        return self._total

    def begin(self) -> int:
        """Forget the peak; what is held now."""
        self._catch_up()
        self._peak = self._live
        return self._live

    def _catch_up(self) -> None:
        if self._source is not None:
            *lines, self._rest = (self._rest + self._source.read()).split(b"\n")
            self.note(lines)


@contextmanager
def counted_allocations() -> Iterator[Allocations]:
    """Count in this block. See Note [Telling of allocations].

    Example:
        >>> import torch
        >>> from shardrt.bench.allocations import counted_allocations
        >>> with counted_allocations() as counted:
        ...     data = torch.zeros(250)
        ...     data.untyped_storage().resize_(4000) and None
        ...     print(counted.live, counted.peak)
        4000 5000
    """
    switch, level = _variables()
    sys.stderr.flush()
    kept = os.dup(2)
    before = level.value
    with tempfile.NamedTemporaryFile(prefix="shardrt-allocations-") as written, Path(written.name).open("rb") as source:
        counted = Allocations(source)
        os.dup2(written.fileno(), 2)
        level.value, switch.value = _INFO, True
        try:
            yield counted
        finally:
            level.value, switch.value = before, False
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            counted.begin()
            for line in counted.others:
                os.write(2, line + b"\n")


def _variables() -> tuple[ctypes.c_bool, ctypes.c_int]:
    import torch

    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        loaded = ctypes.CDLL(str(library))
        return ctypes.c_bool.in_dll(loaded, _SWITCH), ctypes.c_int.in_dll(loaded, _LEVEL)
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"this build of torch does not tell of its allocations ({error}); memory is counted with torch's own "
            "wheels for Linux"
        ) from error

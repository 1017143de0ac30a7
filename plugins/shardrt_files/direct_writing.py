"""Writing a file past the system's own memory.

Note [Past the page cache]: what a process writes is usually copied into memory of the system first, and from there to
the disk. A checkpoint is as large as the state, is synchronised at once and is rarely read soon: the copies take memory
from those who need it, and getting that memory takes longer than the disk does (measured: 0.2 to 1.6 s for the same
gigabyte, where writing past it takes 0.6 s every time). So bytes are gathered in one piece of aligned memory, which
the disk then reads itself. The last, odd piece of a file is written in the usual way; so is everything where the
system or the file system does not know how. What makes a file durable is its synchronisation, either way.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress

try:
    import fcntl
except ImportError:  # a system that has no such calls
    fcntl = None  # type: ignore[assignment]

PIECE = 2 * 2**20
"""Bytes written at once: enough that the disk, not the calls, takes the time."""
_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectWriter:
    """Appends bytes to an open file. See Note [Past the page cache].

    Example:
        >>> from shardrt_files.direct_writing import DirectWriter
        >>> with open("piece", "wb", buffering=0) as file:
        ...     writer = DirectWriter(file.fileno())
        ...     writer.write(memoryview(b"01234"))
        ...     writer.write(memoryview(b"56789"))
        ...     writer.flush()
        >>> open("piece", "rb").read()
        b'0123456789'
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._piece: mmap.mmap | None = None
        self._filled = 0
        self._is_direct = False
        self._may_be_direct = bool(_DIRECT) and fcntl is not None

    def write(self, data: memoryview) -> None:
        """Append all of it; a part may wait in memory until :meth:`flush`."""
        while data.nbytes:
            if not self._may_be_direct and not self._filled:
                _write_all(self._file, data)
                return
            if self._piece is None:
                self._piece = mmap.mmap(-1, PIECE)  # begins where a page does, as the disk wants it
            count = min(data.nbytes, PIECE - self._filled)
            self._piece[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == PIECE:
                self._write_piece()

    def flush(self) -> None:
        """Write what waits."""
        if self._filled:
            self._go_direct(False)
            self._write_piece()
        self._piece = None

    def _write_piece(self) -> None:
        assert self._piece is not None
        if self._may_be_direct and self._filled == PIECE and not self._is_direct:
            self._may_be_direct = self._go_direct(True)
        with memoryview(self._piece) as view:
            rest = view[: self._filled]
            if self._is_direct:
                rest = self._write_direct(rest)
            _write_all(self._file, rest)
            rest.release()
        self._filled = 0

    def _write_direct(self, data: memoryview) -> memoryview:
        """Returns what the file system did not take this way; it will get the rest of the file in the usual one."""
        while data.nbytes:
            try:
                count = os.write(self._file, data)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._may_be_direct = False
                self._go_direct(False)
                break
            data = data[count:]
        return data

    def _go_direct(self, wanted: bool) -> bool:
        if wanted != self._is_direct:
            with suppress(OSError):
                flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags | _DIRECT if wanted else flags & ~_DIRECT)
                self._is_direct = wanted
        return self._is_direct


def _write_all(file: int, data: memoryview) -> None:
    while data.nbytes:  # the system takes at most 2 GiB at a time, and less where a disk is nearly full
        data = data[os.write(file, data) :]

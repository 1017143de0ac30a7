"""Ranges of a file in memory, as tensors of bytes.

Python's own mmap keeps a file handle for each range and warns about tensors that cannot be written; libc's does
neither.

Note [Written pages]: a page of a file that is mapped privately becomes memory of this process when it is written to.
Dropping such pages drops the others too, and each of these costs a fault when it is read again. But most of the time
nothing was written, and the system tells: for each page of a process ``/proc/self/pagemap`` has eight bytes, whose
highest bits say whether it is in memory, whether it was swapped out, and whether it is a file's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_FAILED = ctypes.c_void_p(-1).value
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_PAGE_MAP = Path("/proc/self/pagemap")
_FIXED, _NO_RESERVE = 0x10, 0x4000
"""Of mmap: at just this address, in place of what is there; memory is for what is written only. Python lacks both."""


def whole_pages(nbytes: int) -> int:
    """So many bytes, and the rest of the last page.

    Example:
        >>> from shardrt_shm.mapping import PAGE, whole_pages
        >>> whole_pages(1) == PAGE, whole_pages(PAGE) == PAGE
        (True, True)
    """
    return -(-nbytes // PAGE) * PAGE


def map_range(
    fd: int, offset: int, length: int, *, writable: bool, then: Callable[[int], Any] | None = None
) -> torch.Tensor:
    """A range of a file as a tensor of bytes, which are read and written where they are.

    When the last tensor over it is gone the range is unmapped; ``then`` is called with its address just before.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return _as_tensor(_mapped(None, length, protection, mmap.MAP_SHARED | mmap.MAP_POPULATE, fd, offset), length, then)


class Stretch:
    """Addresses in a row, empty at first, in which pages of files can be shown. Nothing that is written here is seen by
    anybody else.

    Example:
        >>> import os, torch
        >>> from shardrt_shm.mapping import PAGE, Stretch
        >>> fd = os.memfd_create("example")
        >>> _ = os.write(fd, bytes([7]) * PAGE)
        >>> stretch = Stretch(2 * PAGE)
        >>> stretch.show(PAGE, PAGE, fd, 0)
        >>> stretch.memory[PAGE - 1 : PAGE + 1].tolist()
        [0, 7]
        >>> stretch.memory[PAGE] = 8
        >>> os.pread(fd, 1, 0), stretch.drop(), stretch.memory[PAGE].item()
        (b'\\x07', None, 7)
        >>> os.close(fd)
    """

    def __init__(self, length: int) -> None:
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._address = _mapped(None, length, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
        self._length = length
        self._shows_file = np.zeros(whole_pages(length) // PAGE, dtype=bool)
        """By page."""
        self.memory = _as_tensor(self._address, length, None)
        """All of it, as bytes."""

    def show(self, begin: int, length: int, fd: int, offset: int) -> None:
        """Show whole pages of a file."""
        assert 0 <= begin <= begin + length <= self._length
        kind = mmap.MAP_PRIVATE | _NO_RESERVE | _FIXED
        _mapped(self._address + begin, length, mmap.PROT_READ | mmap.PROT_WRITE, kind, fd, offset)
        self._shows_file[begin // PAGE : (begin + length) // PAGE] = True

    def put(self, begin: int, source: torch.Tensor) -> None:
        """Copy bytes to a place."""
        ctypes.memmove(self._address + begin, source.data_ptr(), source.nbytes)

    def drop(self) -> None:
        """Forget what was written to pages of files: they show what these hold. Other pages may become zero."""
        if self._is_written() and _libc.madvise(self._address, self._length, mmap.MADV_DONTNEED):
            code = ctypes.get_errno()
            raise OSError(code, f"{os.strerror(code)}, dropping what was written to {self._length} bytes")

    def _is_written(self) -> bool:
        """Whether a page of a file may have been written to. See Note [Written pages]."""
        try:
            with _PAGE_MAP.open("rb", buffering=0) as pages:
                pages.seek(self._address // PAGE * 8)
                told = pages.read(self._shows_file.nbytes * 8)
        except OSError:
            return True
        if len(told) != self._shows_file.nbytes * 8:
            return True
        state = (np.frombuffer(told, dtype=np.uint64) >> np.uint64(61))[self._shows_file]
        is_there, is_file = state > 1, state % 2 == 1
        # Where no page is there at all the answer may be nobody's, and there is little to drop.
        return not is_there.any() or bool((is_there & ~is_file).any())


def _mapped(at: int | None, length: int, protection: int, kind: int, fd: int, offset: int) -> int:
    address: int = _libc.mmap(at, length, protection, kind, fd, offset)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}, mapping {length} bytes of shared memory")
    return address


def _as_tensor(address: int, length: int, then: Callable[[int], Any] | None) -> torch.Tensor:
    whole = (ctypes.c_char * length).from_address(address)
    # Not at the end of the process: other threads may still be reading then.
    weakref.finalize(whole, _unmap, os.getpid(), address, length, then).atexit = False
    with torch.inference_mode(False):
        return torch.frombuffer(whole, dtype=torch.uint8)


def _unmap(owner: int, address: int, length: int, then: Callable[[int], Any] | None) -> None:
    if os.getpid() == owner and then is not None:  # a forked child gives back nothing of its parent's
        then(address)
    _libc.munmap(address, length)


def give_back(fd: int, offset: int, length: int) -> None:
    """Return the memory of a range of a file to the system; the file keeps its size."""
    _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length)


def move(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the bytes of a tensor without holes. libc's copy of much memory leaves the target out of the cache, which
    torch's does not, and so reads and writes a third less.

    Example:
        >>> import torch
        >>> from shardrt_shm.mapping import move
        >>> target = torch.zeros(2)
        >>> move(target, torch.ones(2))
        >>> target
        tensor([1., 1.])
    """
    assert target.nbytes == source.nbytes, (target.nbytes, source.nbytes)
    if target.nbytes:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)

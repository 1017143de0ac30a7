"""Let the disk begin while there is more to come.

Note [Write early]: the system keeps what is written in memory, and by itself begins to bring it to the disk seconds
later. A file that is synchronised at its end would then wait for all of it at once, while the disk had nothing to do
before. So the system is asked to begin with each piece as it is written; what makes a file durable is still the
synchronisation at its end, and where the system knows no such request nothing is lost but time.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

_BEGIN = 2
"""``SYNC_FILE_RANGE_WRITE``: start writing what is not under way yet, and do not wait for it."""


@functools.cache
def _request() -> Callable[[int, int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is None:  # a C library without it
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    call.restype = ctypes.c_int
    return call  # type: ignore[no-any-return]


def begin_writing(file: int, start: int, count: int) -> bool:
    """Ask the system to bring some bytes of a file to the disk; whether it took the request. Failure is no matter.

    Example:
        >>> import os
        >>> from shardrt_files.early_writing import begin_writing
        >>> with open("piece", "wb", buffering=0) as file:
        ...     _ = file.write(b"0123456789")
        ...     begin_writing(file.fileno(), 0, 10) in (True, False)
        True
    """
    request = _request()
    return request is not None and request(file, start, count, _BEGIN) == 0

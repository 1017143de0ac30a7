"""Waiting for a word of shared memory to change, and waking those who wait, by the kernel's futexes.

Note [Order of writes]: whoever sees a counter must also see what was written before it. x86 keeps the order of writes
by itself. Other processors do not, so there a full barrier stands between the data and the counter, on both sides.
Python has no barrier of its own, but waking a futex has one: the kernel must not miss a waiter that is just arriving.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_NUMBERS = {"x86_64": 202, "aarch64": 98}
_NUMBER = _NUMBERS.get(platform.machine(), 0) if struct.calcsize("P") == 8 else 0
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_KEEPS_ORDER = platform.machine() == "x86_64"


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# A wait lets other threads of this process run meanwhile. Waking takes a microsecond: giving the interpreter away for
# it would cost more.
_blocking = ctypes.CDLL(None, use_errno=True).syscall
_quick = ctypes.PyDLL(None, use_errno=True).syscall
for _call in (_blocking, _quick):
    _call.restype = ctypes.c_long
    _call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p]
_spare = ctypes.c_uint32()


def wait(address: int, expected: int, seconds: float) -> None:
    """Sleep until somebody wakes the word, or at once if it is not as expected, and no longer than so many seconds."""
    whole = int(seconds)
    limit = _Timespec(whole, int((seconds - whole) * 1e9))
    _blocking(_NUMBER, address, _WAIT, expected, ctypes.addressof(limit))


def wake(address: int) -> None:
    """Wake everybody who waits for the word, in any process."""
    _quick(_NUMBER, address, _WAKE, _EVERYBODY, None)


def fence() -> None:
    """Nothing before this is seen after anything behind it. See Note [Order of writes]."""
    if not _KEEPS_ORDER:
        _quick(_NUMBER, ctypes.addressof(_spare), _WAKE, 0, None)


def why_not() -> str:
    """Why there are no futexes here, or nothing.

    Example:
        >>> from shardrt_shm.futex import why_not
        >>> why_not()
        ''
    """
    if not _NUMBER:
        return f"waiting in shared memory is not known for processors of the type {platform.machine()!r}"
    if _quick(_NUMBER, ctypes.addressof(_spare), _WAKE, 0, None) < 0:
        code = ctypes.get_errno()
        name = errno.errorcode.get(code, str(code))
        return f"this system does not let processes wait for one another in memory: {name} ({os.strerror(code)})"
    return ""

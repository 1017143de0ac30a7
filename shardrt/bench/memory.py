"""How much more memory a rank holds for a moment: the system's own high-water mark, set back before.

Writing 5 to ``/proc/self/clear_refs`` sets ``VmHWM`` back to what is resident now. Unlike looking now and then in a
thread, that misses nothing and costs nothing. Freed memory that the allocator keeps is given back first, since using
it again would not show.

Note [Shared pages]: a rank that reads its peers' shared memory where it is has their pages mapped, and the system
counts them as resident in each process that does. They are in memory once. So each counts its share of them: what is
resident of shared memory in the end, less the proportional share (``Pss_Shmem``), is taken off.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_SHARES = Path("/proc/self/smaps_rollup")


@attrs.define(kw_only=True, eq=False)
class Peak:
    """What was held at most, above what there was before."""

    nbytes: int | None = None
    """None until it is over, and where the system does not say."""


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measure a block.

    Example:
        >>> from shardrt.bench.memory import peak_memory
        >>> with peak_memory() as peak:
        ...     data = bytearray(32 * 2**20)
        >>> peak.nbytes is None or peak.nbytes > 30 * 2**20
        True
    """
    gc.collect()
    give_back()
    peak = Peak()
    try:
        _CLEAR.write_text("5")
        before = status_bytes(_STATUS.read_text(), "VmRSS")
        others_before = _others_share()
    except OSError:  # not Linux, or a container that forbids it
        yield peak
        return
    yield peak
    after = status_bytes(_STATUS.read_text(), "VmHWM")
    if before is not None and after is not None:
        # A peer that lets go of pages meanwhile makes this rank's share larger, not what it holds.
        peak.nbytes = max(after - before - max(_others_share() - others_before, 0), 0)


def status_bytes(status: str, field: str) -> int | None:
    """A field of the system's table of a process.

    Example:
        >>> from shardrt.bench.memory import status_bytes
        >>> status_bytes("VmPeak:      20 kB" + chr(10) + "VmHWM:      12 kB", "VmHWM")
        12288
    """
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return 1024 * int(value.split()[0])
    return None


def _others_share() -> int:
    """Bytes of shared memory that are counted here and are other processes' part. See Note [Shared pages]."""
    try:
        resident = status_bytes(_STATUS.read_text(), "RssShmem")
        share = status_bytes(_SHARES.read_text(), "Pss_Shmem")
    except OSError:  # an older kernel
        return 0
    return 0 if resident is None or share is None else max(resident - share, 0)


def give_back() -> None:
    """Return freed memory to the system, where the allocator can be asked to.

    Example:
        >>> from shardrt.bench.memory import give_back
        >>> give_back()
    """
    with suppress(OSError, AttributeError):  # another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)

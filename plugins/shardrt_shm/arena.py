"""The memory of this process that its peers may read: one nameless file, of which tensors are ranges.

Note [One nameless file]: the file comes from ``memfd_create``. It has no name in any file system, so a process that is
killed leaves nothing behind, a container's small /dev/shm does not matter, and nobody can guess or squat a name. Peers
open it through ``/proc/<pid>/fd``, which the kernel allows to processes of the same user in the same pid namespace,
and for reading only. Its mode is 0600, it is sealed against shrinking (a peer that reads a range that is no longer
there would be killed), and it starts with a random token that peers have been told over the control channel.

Note [Ranges are never used twice]: each range lies behind the last one. The memory of a range goes back to the system
when its last tensor is gone, but its place in the file stays empty, so a peer that has mapped it can never take another
range for it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading

import attrs
import torch

from shardrt_shm.mapping import PAGE, give_back, map_range, whole_pages

TOKEN_BYTES = 32
_NOEXEC_SEAL = 0x0008
"""Newer kernels can be set to refuse files without it; Python 3.11 does not know it."""


@attrs.frozen
class Place:
    """Where a tensor lies in the file: its range, and its own first byte from the start of that."""

    offset: int
    length: int
    position: int


class Arena:
    """See Note [One nameless file].

    Example:
        >>> import torch
        >>> from shardrt_shm.arena import Arena
        >>> arena = Arena()
        >>> tensor = arena.take(8).view(torch.float32)
        >>> arena.find(tensor[1:]).position, arena.find(torch.zeros(1))
        (4, None)
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.fd = _nameless_file()
        os.fchmod(self.fd, 0o600)
        os.write(self.fd, self.token)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._end = PAGE
        self._lock = threading.Lock()
        self._ranges: dict[int, tuple[int, int]] = {}
        """Offset and length by address."""

    @property
    def taken(self) -> int:
        """Bytes that tensors hold now."""
        return sum(length for _, length in list(self._ranges.values()))

    def take(self, nbytes: int) -> torch.Tensor:
        """So many bytes, all of them zero; OSError where there is no room."""
        length = whole_pages(max(nbytes, 1))
        with self._lock:
            offset = self._end
            self._end += length
        try:
            # The memory is taken now, or refused: a page that is missing later would kill the process.
            os.posix_fallocate(self.fd, offset, length)
            made = map_range(self.fd, offset, length, writable=True, then=self._freed)
        except OSError:
            give_back(self.fd, offset, length)
            raise
        self._ranges[made.data_ptr()] = (offset, length)
        return made.narrow(0, 0, nbytes)

    def find(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies in this memory, if it does."""
        start = tensor.untyped_storage().data_ptr()
        found = self._ranges.get(start)
        position = tensor.data_ptr() - start
        if found is None or position % tensor.element_size():
            return None
        return Place(*found, position)

    def _freed(self, address: int) -> None:
        # Called by whichever thread lets go of the last tensor, perhaps in the middle of anything: takes no lock.
        offset, length = self._ranges.pop(address)
        give_back(self.fd, offset, length)


def _nameless_file() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("shardrt", flags | _NOEXEC_SEAL)
    except OSError:  # a kernel that does not know the last flag
        return os.memfd_create("shardrt", flags)


_arena: Arena | None = None
_making = threading.Lock()


def process_arena() -> Arena:
    """The one of this process; made when it is first asked for, and again in a forked child."""
    global _arena
    with _making:
        if _arena is None or _arena.pid != os.getpid():
            _arena = Arena()
        return _arena

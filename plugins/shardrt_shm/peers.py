"""The processes of the other ranks, and their memory.

Nothing a peer says is believed: the file must belong to this user, be closed to others, be sealed and hold the token
that came over the control channel, and every range must lie in it.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from shardrt.errors import BackendUnavailableError
from shardrt.protocols import Availability
from shardrt_shm.arena import TOKEN_BYTES, process_arena
from shardrt_shm.mapping import map_range
from shardrt_shm.room import why_no_room

_LEAST_BYTES = 16 * 2**20
"""Room for some communicators, without which there is no point in beginning."""
_MOST_RANGES = 512
"""Ranges of one peer that stay mapped. Only addresses are held: the memory is the peer's."""


@attrs.frozen(kw_only=True)
class Process:
    """A process of this host. Its number may be used again after its end, but not with the same start."""

    pid: int
    started: str

    def state(self) -> str:
        """The letter that the system has for its state; ``X`` for one that has ended."""
        state, started = _status(self.pid)
        return state if started == self.started else "X"

    @property
    def has_ended(self) -> bool:
        """Whether it is gone, or dead and waiting to be noticed by its parent."""
        return self.state() in ("X", "Z")


def _status(pid: int) -> tuple[str, str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "X", ""
    # The second field is the command in parentheses, which may itself hold blanks and parentheses.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]


def introduce() -> dict[str, Any]:
    """Who this process is and where its memory is, for its peers."""
    arena = process_arena()
    return {
        "host": _host(),
        "processes": _namespace(),
        "user": os.geteuid(),
        "pid": arena.pid,
        "started": _status(arena.pid)[1],
        "file": arena.fd,
        "token": arena.token.hex(),
    }


def _host() -> str:
    """This host; where ``SHARDRT_HOST`` makes several of one machine, ranks of one do not share memory with another."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    named = os.environ.get("SHARDRT_HOST")
    return f"{boot} {named}" if named else boot


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


class Peer:
    """The memory of another process, open for reading."""

    def __init__(self, process: Process, fd: int) -> None:
        self.process = process
        self._fd = fd
        self._ranges: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, fd).atexit = False

    def read(self, offset: int, length: int) -> torch.Tensor:
        """A range of its memory as bytes, where they are."""
        with self._lock:
            found = self._ranges.get((offset, length))
            if found is None:
                fd = self.checked(offset, length)
                found = self._ranges[offset, length] = map_range(fd, offset, length, writable=False)
                if len(self._ranges) > _MOST_RANGES:
                    self._ranges.popitem(last=False)
            else:
                self._ranges.move_to_end((offset, length))
            return found

    def checked(self, offset: int, length: int) -> int:
        """The file, for whoever maps this range of it, which must lie in it."""
        if not 0 <= offset <= offset + length <= os.fstat(self._fd).st_size:
            raise BackendUnavailableError(
                f"process {self.process.pid} names bytes {offset} to {offset + length} of its shared memory, "
                f"which has {os.fstat(self._fd).st_size}; this is a bug, please report it"
            )
        return self._fd


_peers: weakref.WeakValueDictionary[tuple[str, int], Peer] = weakref.WeakValueDictionary()
"""By token and file: communicators of the same ranks share them."""
_opening = threading.Lock()


def open_peer(rank: int, introduced: dict[str, Any]) -> Peer:
    """The memory of the process that introduced itself; an error with the reason where it cannot be opened."""
    _check_same("host", introduced["host"], _host(), f"rank {rank} runs on another host")
    other = f"rank {rank} runs in another pid namespace, as containers do"
    _check_same("processes", introduced["processes"], _namespace(), other)
    _check_same("user", introduced["user"], os.geteuid(), f"rank {rank} runs as another user")
    with _opening:
        key = introduced["token"], introduced["file"]
        found = _peers.get(key)
        if found is None:
            found = _peers[key] = _open(rank, introduced)
        return found


def _open(rank: int, introduced: dict[str, Any]) -> Peer:
    process = Process(pid=introduced["pid"], started=introduced["started"])
    path = f"/proc/{process.pid}/fd/{introduced['file']}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise BackendUnavailableError(
            f"the memory of rank {rank} (process {process.pid}) cannot be opened: {error.strerror}; this kernel or "
            "container keeps processes from one another, or the process has ended"
        ) from error
    problem = _what_is_wrong(fd, bytes.fromhex(introduced["token"]))
    if process.has_ended:
        problem = "has ended"
    if problem:
        os.close(fd)
        raise BackendUnavailableError(f"file {introduced['file']} of rank {rank} (process {process.pid}) {problem}")
    return Peer(process, fd)


def suits(introduced: Sequence[dict[str, Any]]) -> Availability:
    """Whether this process can read the memory of all that introduced themselves, and has room for its own."""
    reason = why_no_room(_LEAST_BYTES)
    if reason:
        return Availability.no(reason, fix="use gloo, or give the processes more memory")
    for rank, peer in enumerate(introduced):
        if peer["token"] != process_arena().token.hex():
            try:
                open_peer(rank, peer)
            except BackendUnavailableError as error:
                return Availability.no(str(error), fix="use gloo, or run all ranks in one container of one host")
    return Availability.yes("all ranks read one another's memory")


def _check_same(what: str, theirs: Any, ours: Any, reason: str) -> None:
    if theirs != ours:
        raise BackendUnavailableError(f"{reason} ({what} {theirs}, here {ours})")


def _what_is_wrong(fd: int, token: bytes) -> str:
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode):
        return "is no file of shared memory"
    if about.st_uid != os.geteuid() or about.st_mode & 0o077:
        return f"belongs to user {about.st_uid} with mode {about.st_mode & 0o777:o}, and not to this user alone"
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return "is no file of shared memory"
    if not seals & fcntl.F_SEAL_SHRINK:
        return "is not sealed against shrinking"
    if len(token) != TOKEN_BYTES or not hmac.compare_digest(os.pread(fd, TOKEN_BYTES, 0), token):
        return "does not hold the token that the rank has told"
    return ""

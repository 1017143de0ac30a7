"""Steps: who may read and write what, when.

Note [Steps]: an operation is a number of steps, the same on all ranks. In each, a rank lays data out for its peers,
counts the step as ready, waits until all peers have, takes what it wants, and counts the step as done. Two counters per
rank are all there is: data of step s is there once its writer's ``ready`` is s or more, and nobody reads it any more
once the ``done`` of all others is s or more. So a slot that step s goes through is free when everybody has done step
s - SLOTS, and the writer goes ahead of slow readers by the number of slots, and no further. Data that peers read where
it is needs no slot: its steps are all ready from the start, and the operation ends when all have done the last one.

Counters have 32 bits and go round; two of them are never further apart than one operation is long.

Waiting takes a few looks, lets others have the processor a few times, and then sleeps in the kernel: ranks and their
own computation share the processors. Each half second it looks whether the peer's process is still there.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence

from shardrt.errors import CommunicationError
from shardrt_shm import futex
from shardrt_shm.area import CLOSED, GONE, OPEN, SLOTS, Area
from shardrt_shm.peers import Process

_LOOK_SECONDS = 0.5
_LOOKS = 40
"""Looks at a counter before sleeping: a few microseconds, in which a peer that is just as fast arrives."""
_TURNS = 20
"""After that, times that the processor is offered to others: where ranks share one, the peer that is waited for may be
just the one who wants it, and nobody need be woken. Where nobody wants it this takes some microseconds."""
_MASK = 0xFFFF_FFFF


def _nobody_is_told() -> None:
    pass


def _reached(value: int, target: int) -> bool:
    return (value - target) & _MASK < 0x8000_0000


class Steps:
    """The counters of this rank and its peers. See Note [Steps]."""

    def __init__(
        self,
        own: Area,
        peers: Sequence[tuple[int, Area, Process]],
        *,
        rank: int,
        timeout: float,
        progress: Callable[[], None],
    ) -> None:
        self.operation = ""
        """What is under way, for errors."""
        self.aborted = False
        self._own = own
        self._peers = peers
        self._rank = rank
        self._timeout = timeout
        self._progress = progress
        self._past = 0
        """Steps of all operations before this one."""
        self._failed = False

    def begin(self, count: int, *, write: Callable[[int, int], None] | None) -> bool:
        """Lay out what peers need first of the next operation, if that can be done without waiting; says whether.

        Whoever calls this sees to it that no operation runs meanwhile.
        """
        past = self._past
        if write is not None and not self._all_done(past + 1 - SLOTS):
            return False
        self._failed = True  # until the operation has run
        if write is not None:
            write(0, past)
        self._count(self._own.ready, past + (count if write is None else 1))
        return True

    def run(
        self,
        count: int | None,
        *,
        write: Callable[[int, int], None] | None,
        read: Callable[[int, int], None] | None,
        meet: Callable[[], int | None],
        is_in_place: bool = False,
        has_begun: bool = False,
    ) -> None:
        """Run the steps of one operation: ``count`` of them, or as many as ``meet`` says.

        ``write(k, slot)`` lays out the data of step ``k``; None where this rank has nothing to lay out.
        ``read(k, slot)`` takes the peers'. ``meet`` is called once, when all peers are known to be at their next
        operation. With ``is_in_place`` peers read this rank's data where it is, until this returns. ``has_begun``:
        what :meth:`begin` said of this operation.
        """
        past = self._past
        self._failed = True  # until the end is reached
        written, step = int(has_begun), 0
        known = count
        if write is None and not has_begun:
            self._count(self._own.ready, past + (1 if known is None else known))
        while known is None or step < known:
            # All that the slots have room for, but only the next step's is waited for.
            while write is not None and written < (1 if known is None else min(known, step + SLOTS)):
                free_after = past + written + 1 - SLOTS
                if not self._all_done(free_after):
                    if written > step:
                        break
                    self._wait_for_all("done", free_after)
                write(written, past + written)
                written += 1
                self._count(self._own.ready, past + written)
            self._wait_for_all("ready", past + step + 1)
            if step == 0:
                found = meet()
                if known is None:
                    known = found
                    assert known is not None
                    if write is None:
                        self._count(self._own.ready, past + known)
            if read is not None:
                read(step, past + step)
            step += 1
            self._count(self._own.done, past + step)
        self._past = (past + step) & _MASK
        if is_in_place:
            self._wait_for_all("done", past + step)
        self._failed = False

    def close(self) -> None:
        """Say that this rank takes part in nothing any more, and wake whoever waits for it."""
        self._progress = _nobody_is_told  # this outlives the communicator: see Note [Parting] in joining
        self._own.state.value = CLOSED
        for word in (self._own.ready, self._own.done):
            futex.wake(ctypes.addressof(word))

    def is_over(self) -> bool:
        """Whether nobody is going to read this rank's area any more."""
        return all(
            (_reached(area.done.value, self._past) and not self._failed)
            or area.state.value != OPEN
            or process.has_ended
            for _, area, process in self._peers
        )

    def _count(self, word: ctypes.c_uint32, value: int) -> None:
        futex.fence()
        word.value = value & _MASK
        futex.wake(ctypes.addressof(word))

    def _all_done(self, target: int) -> bool:
        return all(_reached(area.done.value, target) for _, area, _ in self._peers)

    def _wait_for_all(self, what: str, target: int) -> None:
        for rank, area, process in self._peers:
            word: ctypes.c_uint32 = getattr(area, what)
            if not _reached(word.value, target):
                self._wait_for(rank, area, process, word, target, is_enough=GONE if what == "done" else None)
        futex.fence()

    def _wait_for(
        self, rank: int, area: Area, process: Process, word: ctypes.c_uint32, target: int, *, is_enough: int | None
    ) -> None:
        """``is_enough`` is a state that says as much as the counter: see Note [Parting] in joining."""
        for _ in range(_LOOKS):
            if _reached(word.value, target):
                return
        for _ in range(_TURNS):
            os.sched_yield()
            if _reached(word.value, target):
                self._progress()
                return
        started = looked = time.monotonic()
        address = ctypes.addressof(word)
        while not _reached(value := word.value, target) and area.state.value != is_enough:
            futex.wait(address, value, min(_LOOK_SECONDS, self._timeout))
            now = time.monotonic()
            has_parted = area.state.value != OPEN
            if now - looked < min(_LOOK_SECONDS, self._timeout) and not has_parted and not self.aborted:
                continue
            looked = now
            state = process.state()
            # The peer may have counted just before it ended or closed: what it has counted is looked at afterwards.
            if _reached(word.value, target) or area.state.value == is_enough:
                break
            if self.aborted or has_parted or state in ("X", "Z") or now - started >= self._timeout:
                raise self._failure(rank, area, process, state, now - started)
        self._progress()

    def _failure(self, rank: int, area: Area, process: Process, state: str, seconds: float) -> CommunicationError:
        if self.aborted:
            what = "was given up, since the communicator was closed"
        elif state in ("X", "Z"):
            what = f"failed after {seconds:.1f} s: its process {process.pid} has ended; see why rank {rank} ended"
        elif area.state.value != OPEN:
            what = f"failed after {seconds:.1f} s: it has closed its communicator; see why rank {rank} ended"
        else:
            stopped = ", whose process is stopped (SIGSTOP or a debugger)," if state in ("T", "t") else ""
            what = (
                f"took longer than {self._timeout:g} s; rank {rank}{stopped} is stuck, or makes other calls than this "
                "rank, or raise Runtime(timeout=...)"
            )
        error = CommunicationError(f"rank {self._rank}: {self.operation} from rank {rank} {what}")
        error.ranks = (rank,)
        return error

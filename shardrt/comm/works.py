"""Small works: one that is finished already, and one that has something left to do when the wires are done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shardrt.comm.waiting import has_arrived

if TYPE_CHECKING:
    from shardrt.comm.scratch import Lease
    from shardrt.protocols import Work


class FinishedWork:
    """Nothing is left to wait for.

    Example:
        >>> from shardrt.comm.works import FinishedWork
        >>> FinishedWork().wait()
    """

    arrived = True

    def wait(self) -> None:
        """Return at once."""


class FollowedWork:
    """Waits for one or more operations, then runs what follows (divide, unpad, add) exactly once.

    Example:
        >>> from shardrt.comm.works import FinishedWork, FollowedWork
        >>> work = FollowedWork([FinishedWork()], then=lambda: print("divided"))
        >>> work.wait()
        divided
        >>> work.wait()
    """

    def __init__(
        self,
        works: Sequence[Work],
        *,
        then: Callable[[], None] | None = None,
        leases: Sequence[Lease] = (),
        talks: bool = False,
    ) -> None:
        """``talks``: what follows speaks to other ranks, so that all must wait for their works in one order."""
        self._talks = talks
        self._works = works
        self._then = then
        self._leases = leases
        self._done = False
        self._failure: Exception | None = None
        self._lock = threading.Lock()

    @property
    def arrived(self) -> bool:
        """Whether only what this rank does by itself is left. See :func:`shardrt.comm.waiting.has_arrived`."""
        return self._done or (not self._talks and all(has_arrived(work) for work in self._works))

    def wait(self) -> None:
        """Wait, finish and give the scratch back. Waiting again returns at once, or raises the same failure."""
        with self._lock:
            if self._done:
                return
            if self._failure is not None:
                raise self._failure
            try:
                for work in self._works:
                    work.wait()
                if self._then is not None:
                    self._then()
            except Exception as failure:
                self._failure = failure
                raise
            for lease in self._leases:
                lease.release()
            # What follows holds views of the caller's buffer and of the scratch: let go of both.
            self._works, self._then, self._leases = (), None, ()
            self._done = True


class HandedOverWork:
    """An operation that another one sees through, which is known when the first has ended.

    Example:
        >>> from shardrt.comm.works import FinishedWork, HandedOverWork
        >>> rest = []
        >>> work = HandedOverWork(FinishedWork(), rest)
        >>> rest.append(FinishedWork())
        >>> work.wait()
        >>> work.arrived
        True
    """

    def __init__(self, first: Work, rest: Sequence[Work]) -> None:
        """The first puts the one that follows into ``rest``."""
        self._first = first
        self._rest = rest

    @property
    def arrived(self) -> bool:
        """Whether both have ended. See :func:`shardrt.comm.waiting.has_arrived`."""
        return has_arrived(self._first) and all(has_arrived(work) for work in self._rest)

    def wait(self) -> None:
        """For the one, then for the other."""
        self._first.wait()
        self._rest[0].wait()

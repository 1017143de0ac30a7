"""Calls that offer no timeout of their own, with one.

Note [A store that does not answer]: an operation on torch's TCPStore waits for its answer without a limit. If the
process that hosts the store is stopped rather than gone, every rank that asks it anything would wait for ever, with all
timeouts running in vain. So whatever asks the store does it on a thread, and waits for that thread for a time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from shardrt.errors import CommunicationError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")


class _Call:
    __slots__ = ("done", "error", "result", "run")

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run: Callable[[], Any] | None = run
        self.done = threading.Lock()
        self.done.acquire()
        self.result: Any = None
        self.error: BaseException | None = None

    def attempt(self) -> None:
        assert self.run is not None
        try:
            self.result = self.run()
        except BaseException as error:  # raised where it is waited for
            self.error = error
        finally:
            self.run = None
            self.done.release()

    def wait(self, seconds: float) -> bool:
        return self.done.acquire(timeout=min(max(seconds, 0.0), threading.TIMEOUT_MAX))

    def answer(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


def within(seconds: float, what: str, run: Callable[[], T], *, rank: int) -> T:
    """The result of a call that may block for ever, or an error after so many seconds. The call itself goes on.

    Example:
        >>> from shardrt.comm.bounded import within
        >>> within(5.0, "adding", lambda: 1 + 1, rank=0)
        2
    """
    call = _Call(run)
    threading.Thread(target=call.attempt, name=f"shardrt-{what}", daemon=True).start()
    if not call.wait(seconds):
        raise CommunicationError(
            f"rank {rank}: {what} did not end within {seconds:g} s; the process that hosts the group's store or a peer "
            "is stuck: look at the other ranks and the launcher, or raise Runtime(timeout=...)"
        )
    result: T = call.answer()
    return result


class BoundedStore:
    """A store whose operations end. See Note [A store that does not answer].

    Operations run one after the other on one thread, as the store would do them anyway. While one of them is stuck,
    further ones fail at once; if it is answered after all, the store is as good as new.

    Example:
        >>> from torch.distributed import HashStore
        >>> from shardrt.comm.bounded import BoundedStore
        >>> store = BoundedStore(HashStore(), rank=0, timeout=5.0)
        >>> store.set("a", "1")
        >>> store.check(["a"]), store.get("a")
        (True, b'1')
    """

    def __init__(self, store: Store, *, rank: int, timeout: float) -> None:
        self.inner = store
        self.timeout = timeout
        self._rank = rank
        self._stuck: _Call | None = None
        self._lock = threading.Lock()
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._queue,), name="shardrt-store", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        self._do(lambda: self.inner.set(key, value))

    def get(self, key: str) -> bytes:
        """Read a key, which must be there."""
        found: bytes = self._do(lambda: self.inner.get(key))
        return found

    def get_all(self, keys: list[str]) -> list[bytes]:
        """Read several keys, which must be there: in one operation, where the store knows one for that."""
        found: list[bytes] = self._do(lambda: _get_all(self.inner, keys))
        return found

    def check(self, keys: list[str], *, seconds: float | None = None) -> bool:
        """Whether all keys are there."""
        found: bool = self._do(lambda: self.inner.check(keys), seconds)
        return found

    def read(self, key: str, *, seconds: float | None = None) -> bytes | None:
        """What is under a key, or None, as one operation."""
        found: bytes | None = self._do(lambda: self.inner.get(key) if self.inner.check([key]) else None, seconds)
        return found

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""
        found: int = self._do(lambda: self.inner.add(key, amount))
        return found

    def delete_key(self, key: str) -> None:
        """Remove a key."""
        self._do(lambda: self.inner.delete_key(key))

    def compare_set(self, key: str, expected: str, wanted: str) -> None:
        """Write a key if it holds what is expected, or if nothing is expected and it is not there."""
        self._do(lambda: self.inner.compare_set(key, expected, wanted))

    def _do(self, run: Callable[[], Any], seconds: float | None = None) -> Any:
        limit = self.timeout if seconds is None else min(seconds, self.timeout)
        with self._lock:
            # Another thread of this process may be waiting for the same silent store: it waits for both.
            if self._stuck is not None and not self._stuck.wait(0.0):
                raise self._unanswered(limit)
            self._stuck = None
        call = _Call(run)
        self._queue.put(call)
        if not call.wait(limit):
            with self._lock:
                self._stuck = call
            raise self._unanswered(limit)
        try:
            return call.answer()
        except RuntimeError as error:  # torch's DistStoreError and DistNetworkError
            raise CommunicationError(
                f"rank {self._rank} lost the group's store, which lives in the launcher or in rank 0: {error}; "
                "look at that process's output for why it ended"
            ) from error

    def _unanswered(self, limit: float) -> CommunicationError:
        return CommunicationError(
            f"rank {self._rank}: the group's store, which lives in the launcher or in rank 0, has not answered within "
            f"{limit:g} s; that process is stopped or cannot be reached: look at it, or raise Runtime(timeout=...)"
        )


def _get_all(store: Any, keys: list[str]) -> list[bytes]:
    return store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]


def _serve(queue: SimpleQueue[_Call | None]) -> None:
    while (call := queue.get()) is not None:
        call.attempt()
        del call  # kept until the next one comes, it would keep its answer alive

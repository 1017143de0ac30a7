"""Gradients that a DDP communication hook of the user's reduces: compressed, approximated, whatever it does.

Note [Hooks take turns]: some hooks (PowerSGD) start further collectives when the first has ended, from the thread that
ended it. With several buckets under way ranks may start those in different orders, and on Gloo that is a hang. On the
CPU hooks are therefore called in a thread of their own, one bucket after the other. On devices with streams order is
the stream's business, and the hook is called where DDP calls it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shardrt.errors import CommunicationError, ShardrtError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

    BucketFuture = torch.futures.Future[torch.Tensor]
    CommHook = Callable[[Any, GradBucket], BucketFuture]

_LOOK_FOR_FAILURES_SECONDS = 0.5


class Patience(Protocol):
    """How long to wait for other ranks, and how to hear from them meanwhile: a runtime has both."""

    rank: int
    timeout: float

    def raise_if_peer_failed(self) -> None:
        """Raise if another rank has reported a failure."""
        ...

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed."""
        ...


class HookResults:
    """What hooks made of DDP's buckets in the current backward, parameter by parameter."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._parts: dict[torch.Tensor, torch.Tensor] = {}
        self._failure: Exception | None = None
        self._changed = threading.Condition()

    def add(self, bucket: GradBucket, reduced: torch.Tensor) -> None:
        """A hook has returned a whole bucket: cut it up as DDP laid it out."""
        buffer = bucket.buffer()
        start = buffer.storage_offset()
        with self._changed:
            for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                self._parts[param] = reduced.as_strided(
                    gradient.shape, gradient.stride(), reduced.storage_offset() + gradient.storage_offset() - start
                )
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """A hook failed: whoever waits for a gradient gets its error."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def forget(self) -> None:
        """The step is done; the next backward brings new ones."""
        with self._changed:
            self._parts.clear()

    def wait_for(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The reduced gradients of some parameters, once they are there."""
        deadline = time.monotonic() + self._patience.timeout
        with self._changed:
            while self._failure is None and not all(param in self._parts for param in params):
                if not self._changed.wait(_LOOK_FOR_FAILURES_SECONDS):
                    self._patience.raise_if_peer_failed()
                    if time.monotonic() > deadline:
                        raise CommunicationError(
                            f"rank {self._patience.rank}: the communication hook of DDP has not returned its buckets "
                            f"within {self._patience.timeout:g} s; see what its collectives wait for, or raise "
                            "Runtime(timeout=...)"
                        )
            if self._failure is not None:
                raise self._failure
            return [self._parts[param] for param in params]


class OrderedHook:
    """Calls a user's communication hook for one bucket after the other; passes on what it returns."""

    def __init__(self, hook: CommHook, state: Any, *, results: Sequence[HookResults], patience: Patience) -> None:
        self._calls = _HookCalls(hook, state, results, patience)
        self._queue: SimpleQueue[_Queued | None] | None = None

    def __call__(self, bucket: GradBucket) -> BucketFuture:
        """Start the hook on a bucket."""
        if bucket.buffer().device.type != "cpu":
            return self._calls.inline(bucket)
        if self._queue is None:
            self._queue = SimpleQueue()
            arguments = (self._queue, self._calls)
            threading.Thread(target=_serve, args=arguments, name="shardrt-comm-hook", daemon=True).start()
            weakref.finalize(self, self._queue.put, None)
        queued = _Queued(bucket)
        self._queue.put(queued)
        if bucket.is_last():
            # DDP's own collectives come next (which parameters were used): not before all of the hook's have ended.
            self._calls.patiently(queued.done)
        return queued.promised

    def raise_failure(self) -> None:
        """After backward: raise what the hook ended with, if it failed."""
        if self._calls.failure is not None:
            raise self._calls.failure


class _Queued:
    """A bucket whose turn is to come."""

    def __init__(self, bucket: GradBucket) -> None:
        self.bucket = bucket
        self.promised: BucketFuture = torch.futures.Future()
        self.done = threading.Event()


class _HookCalls:
    """One hook, and where its results go."""

    def __init__(self, hook: CommHook, state: Any, results: Sequence[HookResults], patience: Patience) -> None:
        self._hook = hook
        self._state = state
        self._results = results
        self._patience = patience
        self.failure: Exception | None = None

    def inline(self, bucket: GradBucket) -> BucketFuture:
        """Where DDP calls it; results are taken when its future completes."""
        return self._hook(self._state, bucket).then(lambda done: self._take(bucket, done.value()))

    def in_turn(self, queued: _Queued) -> None:
        """To the end, in this thread.

        An error goes to whoever waits for a gradient and to the peers. DDP gets its bucket back as it was: what it is
        told of an error it passes on as one of its own.
        """
        reduced = queued.bucket.buffer()
        try:
            if self.failure is None:
                reduced = self._take(queued.bucket, self._wait(self._hook(self._state, queued.bucket)))
        except Exception as error:
            self.failure = error if isinstance(error, ShardrtError) else _explained(error, self._patience.rank)
            self._patience.report_failure(self.failure)
            for results in self._results:
                results.fail(self.failure)
        finally:
            queued.promised.set_result(reduced)
            queued.done.set()

    def _take(self, bucket: GradBucket, value: Any) -> torch.Tensor:
        reduced: torch.Tensor = value[0] if isinstance(value, (list, tuple)) else value
        for results in self._results:
            results.add(bucket, reduced)
        return reduced

    def _wait(self, future: BucketFuture) -> Any:
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        self.patiently(done)
        return future.value()

    def patiently(self, done: threading.Event) -> None:
        """Wait, but not for ever, and not for a peer that has failed."""
        deadline = time.monotonic() + self._patience.timeout
        while not done.wait(_LOOK_FOR_FAILURES_SECONDS):
            self._patience.raise_if_peer_failed()
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"rank {self._patience.rank}: the communication hook of DDP did not finish within "
                    f"{self._patience.timeout:g} s; a peer is stuck or gone, or raise Runtime(timeout=...)"
                )


def _explained(error: Exception, rank: int) -> CommunicationError:
    explained = CommunicationError(
        f"rank {rank}: the communication hook of DDP failed: {type(error).__name__}: {error}"
    )
    explained.__cause__ = error
    return explained


def _serve(queue: SimpleQueue[_Queued | None], calls: _HookCalls) -> None:
    while (queued := queue.get()) is not None:
        calls.in_turn(queued)
        del queued

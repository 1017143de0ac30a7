"""One thread per communicator that runs its operations in the order in which they were issued.

Note [One issuing order]: peers match operations by order, so all ranks must issue them in one order. A queue served
by a single thread keeps the order of the calls whatever finishes first, and lets the caller go on computing. Two
streams of operations that need no common order use two communicators.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from shardrt.errors import CommunicationError, PeerError, ShardrtError
from shardrt.protocols import ControlChannel

if TYPE_CHECKING:
    from shardrt.flight import FlightRecorder, Operation
    from shardrt.timeline import Timeline

_LOOK_FOR_FAILURES_SECONDS = 0.5
_GRACE_SECONDS = 5.0
"""How much longer than the operation's own timeout a waiter stays, to hear the operation's own, better error."""


class ThreadedWork:
    """An operation queued on an :class:`OperationThread`."""

    def __init__(self, owner: OperationThread, operation: str, details: Mapping[str, Any] | None = None) -> None:
        self.operation = operation
        self.details = details
        """What a timeline shows of it; None where nothing is recorded."""
        self.record: Operation | None = None
        """Its entry among the last operations of this rank; None where nobody keeps them."""
        self.error: BaseException | None = None
        self._owner = owner
        self._done = threading.Event()

    def finish(self, error: BaseException | None = None) -> None:
        """Called by the thread: wake whoever waits."""
        self.error = error
        self._done.set()

    @property
    def succeeded(self) -> bool:
        """Whether it has ended already, and well."""
        return self._done.is_set() and self.error is None

    @property
    def arrived(self) -> bool:
        """Whether it has ended already. See :func:`shardrt.comm.waiting.has_arrived`."""
        return self._done.is_set()

    def wait(self) -> None:
        """See :class:`shardrt.protocols.Work`."""
        if not self._done.is_set():
            self._owner.wait_for(self._done, self.operation)
        if self.error is not None:
            self._owner.look_for_cause()
            self._owner.explain(self.error)
            raise self.error


class OperationThread:
    """Runs operations one after the other; after the first failure every further one fails at once, saying why."""

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        timeout: float,
        control: ControlChannel,
        abort: Callable[[], None] | None = None,
        timeline: Timeline | None = None,
        flight: FlightRecorder | None = None,
    ) -> None:
        """``abort`` ends whatever operation is under way; called when nobody waits for it any more.

        Operations and waits are recorded in the ``timeline``, and among the last operations that ``flight`` keeps, if
        there are such.
        """
        self._rank = rank
        self._timeout = timeout
        self._control = control
        self._queue: SimpleQueue[tuple[ThreadedWork, Callable[[], None]] | None] = SimpleQueue()
        self._broken: BaseException | None = None
        self._progress = time.monotonic()
        self._closed = False
        self._given_up = False
        self._given_up_for: PeerError | None = None
        self._looked_for_cause = False
        self._abort = abort
        self._timeline = timeline
        self._flight = flight
        self._under_way: ThreadedWork | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        # A thread that is still inside the network layer when the interpreter ends would take the process down with it.
        atexit.register(self._leave)

    def submit(
        self,
        operation: str,
        run: Callable[[], None],
        *,
        communicator: int = 0,
        number: int = 0,
        record: Operation | None = None,
        **details: Any,
    ) -> ThreadedWork:
        """Queue an operation. Its kind is the first word of its description; ``details`` are for the timeline.

        The numbers of ``communicator`` and operation tell ranks which operations belong together. ``record`` is for
        the rest of an operation that began on another thread: what :meth:`hand_over` returned there.
        """
        self.check_open(operation)
        work = ThreadedWork(self, operation)
        if record is not None:
            work.record = record
        elif self._flight is not None:
            kind = operation.partition(" ")[0]
            work.record = self._flight.issue(
                kind, communicator=communicator, number=number, nbytes=details.get("bytes", 0)
            )
        if communicator and record is None:
            details |= {"communicator": communicator, "number": number}
        if self._timeline is not None:
            work.details = {**details, **self._timeline.noted()}
        self._queue.put((work, run))
        return work

    def check_open(self, operation: str) -> None:
        """Refuse an operation once the thread has been told to end."""
        if self._closed:
            raise CommunicationError(
                f"rank {self._rank}: {operation} on a communicator that was closed; make a new runtime, and with it "
                "what is to be trained"
            )

    def hand_over(self) -> Operation | None:
        """Called from inside an operation that another thread is going to end: what that one is to go on recording."""
        assert self._under_way is not None
        record, self._under_way.record = self._under_way.record, None
        return record

    def explain(self, error: BaseException) -> None:
        """Add to an error that is about to be raised what the other ranks did last, if anybody knows."""
        if self._flight is not None:
            self._flight.explain(error)

    def note_progress(self) -> None:
        """Called from inside a long operation: something has arrived, so waiting on is worth while."""
        self._progress = time.monotonic()

    def wait_for(self, done: threading.Event, operation: str) -> None:
        """Block until the event is set, a peer reports a failure, or nothing has moved for the timeout."""
        if self._timeline is None:
            self._wait_for(done, operation)
            return
        started = time.perf_counter()
        try:
            self._wait_for(done, operation)
        finally:
            self._timeline.waited(operation, started, time.perf_counter())

    def _wait_for(self, done: threading.Event, operation: str) -> None:
        started = time.monotonic()
        if self._given_up_for is not None:
            raise self._given_up_for  # the peer that failed is not coming back: do not look for it once per operation
        while not done.wait(_LOOK_FOR_FAILURES_SECONDS):
            self._given_up = True  # unless the operation is still worth waiting for after these two looks
            try:
                self._control.raise_if_peer_failed()
            except PeerError as failure:
                self._given_up_for = failure
                raise
            if time.monotonic() - max(started, self._progress) > self._timeout + _GRACE_SECONDS:
                error = CommunicationError(
                    f"rank {self._rank}: {operation} did not finish within {self._timeout:g} s; a peer is stuck or "
                    "gone; look at the other ranks, or raise Runtime(timeout=...)"
                )
                self.explain(error)
                raise error
            self._given_up = False

    def look_for_cause(self) -> None:
        """A connection that broke is often the consequence of a failure that its rank has reported: that is raised."""
        if self._looked_for_cause:
            return
        self._looked_for_cause = True
        deadline = time.monotonic() + _LOOK_FOR_FAILURES_SECONDS
        while time.monotonic() < deadline:
            self._control.raise_if_peer_failed()
            time.sleep(0.05)

    def close(self) -> None:
        """Let queued operations finish and end the thread."""
        if self._closed:
            return
        atexit.unregister(self._leave)
        hopeless = self._given_up or self._broken is not None or self._control.failed
        self._end(patience=0.0 if hopeless else self._timeout)

    def _peer_failed(self) -> bool:
        try:
            self._control.raise_if_peer_failed()
        except PeerError:
            return True
        return False

    def _leave(self) -> None:
        self._end(patience=0.0)

    def _end(self, patience: float) -> None:
        self._closed = True
        self._queue.put(None)
        deadline = time.monotonic() + patience
        self._thread.join(timeout=0.1)
        # Operations that nobody has waited for may be waiting for a rank that failed meanwhile.
        while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0 and not self._peer_failed():
            self._thread.join(timeout=min(left, _LOOK_FOR_FAILURES_SECONDS))
        if self._thread.is_alive() and self._abort is not None:
            self._abort()
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        import torch

        # Modes are per thread. In this one it may write to any tensor, also to one that was made in inference mode.
        with torch.inference_mode():
            while (item := self._queue.get()) is not None:
                work, run = item
                self._under_way = work
                if work.record is not None:
                    work.record.start()
                error = self._attempt(work.operation, run if work.details is None else self._recorded(work, run))
                if work.record is not None:
                    work.record.finish(error)
                work.finish(error)
                # A closure kept until the next operation arrives would keep its buffers alive.
                self._under_way = None
                del item, work, run, error

    def _recorded(self, work: ThreadedWork, run: Callable[[], None]) -> Callable[[], None]:
        def recorded() -> None:
            assert self._timeline is not None and work.details is not None
            started = time.perf_counter()
            try:
                run()
            finally:
                kind = work.operation.partition(" ")[0]
                self._timeline.operation(kind, started, time.perf_counter(), work.details)

        return recorded

    def _attempt(self, operation: str, run: Callable[[], None]) -> BaseException | None:
        if self._broken is not None:
            return CommunicationError(
                f"rank {self._rank}: {operation} was not started, since an earlier operation failed: "
                f"{str(self._broken).partition(chr(10))[0]}"
            )
        self._progress = time.monotonic()
        try:
            run()
        except ShardrtError as error:
            self._broken = error
        except Exception as error:
            self._broken = CommunicationError(f"rank {self._rank}: {operation} failed: {error}")
            self._broken.__cause__ = error
        finally:
            self._progress = time.monotonic()
        return self._broken

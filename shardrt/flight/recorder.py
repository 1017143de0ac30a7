"""The last operations of this rank, in a ring that never grows.

Note [Recording costs next to nothing]: recording is always on where there are several ranks, and every operation passes
here. So an operation is one small object whose times are filled in as it goes; it is put into a list at an index that a
counter hands out. Both are single steps of the interpreter, so there is no lock. Only one clock is read; the wall clock
is worked out when somebody looks.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

RING_SIZE = 64
"""Operations that are kept. Those under way are kept beside them, however many have been queued since."""

_SHOWN_UNDER_WAY = 4
_SHOWN_QUEUED = 1


class Operation:
    """One operation of a communicator, or one exchange of the control channel, from being issued to its end.

    Example:
        >>> from shardrt.flight import FlightRecorder
        >>> flight = FlightRecorder(rank=0, world_size=2)
        >>> operation = flight.issue("all_gather", communicator=4096, number=7, nbytes=128)
        >>> operation.state, operation.describe()
        ('queued', 'all_gather 7 of communicator 4096')
        >>> operation.start()
        >>> operation.finish()
        >>> operation.state
        'done'
    """

    __slots__ = (
        "_recorder",
        "bucket",
        "communicator",
        "error",
        "finished",
        "issued",
        "kind",
        "nbytes",
        "number",
        "sequence",
        "started",
        "topic",
        "waits_for",
    )

    def __init__(
        self,
        recorder: FlightRecorder,
        sequence: int,
        kind: str,
        communicator: int,
        number: int,
        nbytes: int,
        topic: str,
        bucket: int | None,
    ) -> None:
        self._recorder = recorder
        self.sequence = sequence
        self.kind = kind
        self.communicator = communicator
        self.number = number
        self.nbytes = nbytes
        self.topic = topic
        self.bucket = bucket
        self.waits_for: Sequence[int] = ()
        """Ranks that it was seen to wait for when it failed; empty while nobody knows."""
        self.issued = time.monotonic()
        self.started = 0.0
        self.finished = 0.0
        self.error: str | None = None

    @property
    def state(self) -> str:
        """``queued``, ``under way``, ``done`` or ``failed``."""
        if self.error is not None:
            return "failed"
        if self.finished:
            return "done"
        return "under way" if self.started else "queued"

    def start(self) -> None:
        """It is its turn."""
        self.started = time.monotonic()
        self._recorder.under_way[self.sequence] = self

    def finish(self, error: BaseException | None = None) -> None:
        """It has ended, well or with an error."""
        self.finished = time.monotonic()
        if error is None:
            self._recorder.last_finished = self
        else:
            self.error = str(error).partition("\n")[0]
            self.waits_for = getattr(error, "ranks", ())
            if self._recorder.first_failed is None:
                self._recorder.first_failed = self
        self._recorder.under_way.pop(self.sequence, None)

    def describe(self) -> str:
        """What it is, in a few words."""
        return described(self.kind, self.communicator, self.number, self.topic)

    def to_json(self, clock: tuple[float, float]) -> dict[str, Any]:
        """Plain values; ``clock`` is one moment on the monotonic clock and on the wall."""
        monotonic, wall = clock
        times = {"issued": self.issued, "started": self.started, "finished": self.finished}
        return {
            "sequence": self.sequence,
            "kind": self.kind,
            "communicator": self.communicator,
            "number": self.number,
            "topic": self.topic,
            "bytes": self.nbytes,
            "bucket": self.bucket,
            "state": self.state,
            **{name: round(wall + moment - monotonic, 6) if moment else None for name, moment in times.items()},
            **{f"{name}_monotonic": round(moment, 6) if moment else None for name, moment in times.items()},
            "waits_for": list(self.waits_for),
            "error": self.error,
        }


def described(kind: str, communicator: int, number: int, topic: str = "") -> str:
    """An operation in a few words, the same wherever it is told of.

    Example:
        >>> from shardrt.flight.recorder import described
        >>> described("exchange", 1, 3, "optimizer")
        "exchange 3 ('optimizer') of channel 1"
    """
    if kind == "exchange":
        return f"exchange {number} ({topic!r}) of channel {communicator}"
    return f"{kind} {number} of communicator {communicator}"


class Noted(threading.local):
    """What a thread is at."""

    bucket: int | None = None


noted = Noted()
"""What the calling thread is at: operations that it issues carry ``noted.bucket``. One for all recorders: a thread is
at one thing at a time."""


class Watch(Protocol):
    """Who is told of failures: the runtime's own watch."""

    def explain(self, error: BaseException) -> None:
        """Add to an error that is about to be raised."""
        ...

    def peer_failed(self, note: Mapping[str, Any]) -> None:
        """Another rank has reported a failure."""
        ...


class FlightRecorder:
    """The last operations of this rank. Any thread may add to it. See Note [Recording costs next to nothing].

    ``explain`` is called with the error of a wait that failed, before it is raised: the runtime adds to its text what
    the other ranks did last. A backend that raises such errors by itself calls it too.

    Example:
        >>> from shardrt.flight import FlightRecorder
        >>> flight = FlightRecorder(rank=0, world_size=2, size=2)
        >>> for number in (1, 2, 3):
        ...     operation = flight.issue("all_reduce", communicator=4096, number=number)
        ...     operation.start()
        ...     operation.finish()
        >>> [operation.number for operation in flight.operations()]
        [2, 3]
        >>> flight.summary()["finished"]["number"]
        3
    """

    def __init__(self, rank: int, world_size: int, *, size: int = RING_SIZE) -> None:
        self.rank = rank
        self.world_size = world_size
        self.step = 0
        """Steps that an optimizer of this runtime has finished."""
        self.under_way: dict[int, Operation] = {}
        self.last_finished: Operation | None = None
        self.first_failed: Operation | None = None
        """What failed first is usually the cause of what failed later."""
        self.failure: str | None = None
        """What this rank failed with, in a line."""
        self._ring: list[Operation | None] = [None] * size
        self._size = size
        self._sequence = itertools.count()
        self._watch: Watch | None = None

    def issue(self, kind: str, *, communicator: int, number: int, nbytes: int = 0, topic: str = "") -> Operation:
        """An operation has been asked for: peers match it by the numbers of the communicator and of the operation."""
        sequence = next(self._sequence)
        operation = Operation(self, sequence, kind, communicator, number, nbytes, topic, noted.bucket)
        self._ring[sequence % self._size] = operation
        return operation

    def explain(self, error: BaseException) -> None:
        """A wait failed with this error: add to it who was last heard when, as far as anybody asked for that."""
        if self._watch is not None:
            self._watch.explain(error)

    def peer_failed(self, note: Mapping[str, Any]) -> None:
        """Another rank has reported a failure, which this one may not notice for long."""
        if self._watch is not None:
            self._watch.peer_failed(note)

    def watched_by(self, watch: Watch) -> None:
        """Who is told of failures."""
        self._watch = watch

    def operations(self) -> list[Operation]:
        """The operations that are kept, in the order in which they were issued."""
        kept = {operation.sequence: operation for operation in list(self._ring) if operation is not None}
        kept.update(list(self.under_way.items()))
        return [kept[sequence] for sequence in sorted(kept)]

    def to_json(self) -> list[dict[str, Any]]:
        """All of them as plain values."""
        clock = (time.monotonic(), time.time())
        return [operation.to_json(clock) for operation in self.operations()]

    def summary(self) -> dict[str, Any]:
        """What the other ranks get to know: who and where this is, what was done last, what is under way."""
        clock = (time.monotonic(), time.time())
        last, broken, kept = self.last_finished, self.first_failed, self.operations()
        running = [operation for operation in kept if operation.state == "under way"]
        queued = [operation for operation in kept if operation.state == "queued"]
        return {
            "time": clock[1],
            "pid": os.getpid(),
            "host": _HOST,
            "step": self.step,
            "finished": None if last is None else _short(last, clock),
            "under_way": [_short(operation, clock) for operation in running[:_SHOWN_UNDER_WAY]],
            "failed": None if broken is None else _short(broken, clock),
            "failure": self.failure,
            "queued": [_short(operation, clock) for operation in queued[:_SHOWN_QUEUED]],
            "waiting": len(running) + len(queued),
        }


_HOST = socket.gethostname()


def _short(operation: Operation, clock: tuple[float, float]) -> dict[str, Any]:
    whole = operation.to_json(clock)
    names = ("kind", "communicator", "number", "topic", "bytes", "bucket", "issued", "started", "finished")
    return {name: whole[name] for name in names}

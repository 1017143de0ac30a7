"""A step engine that moves nothing and remembers everything: what was done, in which order, and what was forgotten."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Literal

import attrs

from shardrt.errors import CommunicationError
from shardrt.protocols import Work

Fault = Literal["reduce", "reduce wait", "update", "gather", "gather wait"]
_LONGEST_DELAY = 0.002


class EngineFault(CommunicationError):
    """The failure that a recording engine was told to have."""


@attrs.define(eq=False)
class RecordedWork:
    """An operation of a recording engine; fails in ``wait`` if it was told to, after which it counts as waited for."""

    engine: RecordingEngine
    kind: str
    bucket: int
    waited: bool = False
    arrived: bool = False
    """What it says if it is asked, see :func:`shardrt.comm.waiting.has_arrived`: by chance, where there are delays."""

    def wait(self) -> None:
        """Take a random while on the first call."""
        if self.waited:
            return
        self.engine.pause()
        self.waited = True
        self.engine.fail_if_told(f"{self.kind} wait", self.bucket)
        self.engine.events.append((f"{self.kind} done", self.bucket))


@attrs.define(eq=False)
class RecordingEngine:
    """See :class:`shardrt.protocols.StepEngine`.

    Example:
        >>> from shardrt.testing.conformance.engine import RecordingEngine
        >>> engine = RecordingEngine(bucket_count=1)
        >>> engine.reduce(0).wait()
        >>> engine.update()
        >>> [work.kind for work in [engine.gather(0)]], engine.outstanding()
        (['gather'], ['gather of bucket 0'])
    """

    bucket_count: int
    gathers_apart: bool = True
    delays: random.Random | None = None
    fault: tuple[Fault, int] | None = None
    """Fail at this place, in this bucket."""
    events: list[tuple[str, int]] = attrs.field(factory=list)
    """What happened, in order."""
    works: list[RecordedWork] = attrs.field(factory=list)
    reductions: dict[int, RecordedWork] = attrs.field(factory=dict)
    """Those that no update has used yet: a bucket that is reduced already is not reduced again."""
    left_to_readers: list[RecordedWork] = attrs.field(factory=list)
    """Gathers that the schedule need not wait for."""

    def reduce(self, bucket: int) -> RecordedWork:
        """Start a reduction that takes until it is waited for."""
        if bucket not in self.reductions:
            self.reductions[bucket] = self._start("reduce", bucket)
        return self.reductions[bucket]

    def update(self, buckets: Sequence[int] | None = None) -> None:
        """Step nothing. A fault of the update, in bucket -1, is one of every update."""
        self.fail_if_told("update", -1)
        for bucket in range(self.bucket_count) if buckets is None else buckets:
            self.events.append(("update", bucket))
            self.reductions.pop(bucket, None)

    def gather(self, bucket: int) -> RecordedWork:
        """Start a gather that takes until it is waited for."""
        return self._start("gather", bucket)

    def gather_for_readers(self, bucket: int, started: Work | None = None) -> None:
        """Start a gather, if it is not, that :meth:`read_everything` waits for."""
        gathering = self.gather(bucket) if started is None else started
        assert isinstance(gathering, RecordedWork)
        self.left_to_readers.append(gathering)

    def reading_order(self) -> Sequence[int]:
        """Some order, neither that of the buckets nor its reverse."""
        return [*range(1, self.bucket_count, 2), *range(0, self.bucket_count, 2)]

    def read_everything(self) -> None:
        """What the next forward does."""
        for work in self.left_to_readers:
            work.wait()

    def outstanding(self) -> list[str]:
        """Operations that were started, and that neither the schedule waited for nor a reader is going to."""
        left = (work for work in self.works if not work.waited and work not in self.left_to_readers)
        return [f"{work.kind} of bucket {work.bucket}" for work in left]

    def issued(self) -> list[tuple[str, int]]:
        """The collective calls, in the order in which they were made: it must be the same on all ranks."""
        return [(work.kind, work.bucket) for work in self.works]

    def fail_if_told(self, place: str, bucket: int) -> None:
        """Raise at the place of the fault."""
        if self.fault is not None and self.fault == (place, bucket):
            raise EngineFault(f"{place} of bucket {bucket} fails, as the check demands")

    def pause(self) -> None:
        """Take a random while, if delays were asked for."""
        if self.delays is not None:
            time.sleep(self.delays.random() * _LONGEST_DELAY)

    def _start(self, kind: str, bucket: int) -> RecordedWork:
        if not 0 <= bucket < self.bucket_count:
            raise AssertionError(f"{kind} of bucket {bucket}; there are {self.bucket_count}, numbered from 0")
        self.pause()
        self.fail_if_told(kind, bucket)
        self.events.append((kind, bucket))
        arrived = self.delays is not None and self.delays.random() < 0.5
        self.works.append(RecordedWork(self, kind, bucket, arrived=arrived))
        return self.works[-1]

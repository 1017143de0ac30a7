"""Stepping in a thread of its own, so that backward never waits for the network.

Note [A third early]: a step sends as much in gathers as in reductions, and backward takes about two thirds of the time.
So wires are evenly busy if a third of the gathers travels during backward, beside the reductions, and the rest during
the next forward. It is every third bucket, so that forward has some to compute with wherever it is, while the next is
on its way. Which buckets these are follows from their numbers alone, the same on all ranks.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from queue import SimpleQueue
from weakref import WeakKeyDictionary

import attrs

from shardrt.comm.waiting import start_and_wait
from shardrt.protocols import StepEngine, Work


class InterleavedSchedule:
    """Reductions are issued by backward, in bucket order. A thread waits for each and steps the bucket; every third one
    it gathers at once, on a second communicator, in the same order. When all are stepped the other gathers are issued,
    in the order in which forward reads. So both orders follow from the buckets alone. Gathers that are still under way
    are left to whoever reads the parameters.

    On a backend with one communicator each bucket is stepped, and gathered, right after the reduction of the next one
    was issued: again one order, whatever part of it falls into backward.
    """

    name = "interleaved"
    bucket_mb: float | None = 8.0
    gathers_apart = True
    updates_early = True

    def __init__(self) -> None:
        self._iterations: WeakKeyDictionary[StepEngine, _Iteration] = WeakKeyDictionary()
        self._queue: SimpleQueue[_SteppedBucket | None] | None = None

    def bucket_ready(self, engine: StepEngine, bucket: int) -> None:
        """Start the reduction and leave the rest to the thread, or to the next bucket."""
        self._start(engine, bucket)

    def step(self, engine: StepEngine) -> None:
        """Wait until every bucket is stepped, those included that backward has not brought; gather what is left."""
        iteration = self._iterations.setdefault(engine, _Iteration())
        try:
            start_and_wait(lambda bucket: self._start(engine, bucket), range(engine.bucket_count))
            for bucket in engine.reading_order():
                stepped = iteration.buckets[bucket]
                engine.gather_for_readers(bucket, stepped.gather)
                stepped.gather = None  # the readers' from now on
        except Exception:
            with suppress(Exception):  # the first error is the one that matters, and it is on its way
                started = [one.gather for one in iteration.buckets.values() if one.gather is not None]
                start_and_wait(started.__getitem__, range(len(started)))
            raise
        finally:
            self._iterations.pop(engine, None)
            iteration.buckets.clear()  # they know the iteration: neither would go before the collector comes

    def _start(self, engine: StepEngine, bucket: int) -> _SteppedBucket:
        iteration = self._iterations.setdefault(engine, _Iteration())
        if bucket not in iteration.buckets:
            stepped = _SteppedBucket(engine, bucket, iteration.reduce(engine, bucket), iteration)
            iteration.buckets[bucket] = stepped
            if engine.gathers_apart:
                self._running_queue().put(stepped)
            else:
                before, iteration.waiting = iteration.waiting, stepped
                if before is not None:
                    before.run()
        return iteration.buckets[bucket]

    def _running_queue(self) -> SimpleQueue[_SteppedBucket | None]:
        if self._queue is None:
            self._queue = SimpleQueue()
            threading.Thread(target=_serve, args=(self._queue,), name="shardrt-interleaved", daemon=True).start()
            weakref.finalize(self, self._queue.put, None)
        return self._queue


@attrs.define(eq=False)
class _Iteration:
    """The buckets of one engine between two steps."""

    buckets: dict[int, _SteppedBucket] = attrs.field(factory=dict)
    waiting: _SteppedBucket | None = None
    """With one communicator: the bucket whose turn comes after the next reduction."""
    failed: bool = False
    """After a failure nothing more is updated; reductions under way are still seen through."""

    def reduce(self, engine: StepEngine, bucket: int) -> Work:
        """Start a reduction, and remember if that failed."""
        try:
            return engine.reduce(bucket)
        except Exception:
            self.failed = True
            raise


class _SteppedBucket:
    """One bucket on its way through reduction, step and gather."""

    def __init__(self, engine: StepEngine, bucket: int, reduction: Work, iteration: _Iteration) -> None:
        self._engine = engine
        self._bucket = bucket
        self._reduction = reduction
        self._iteration = iteration
        self.gather: Work | None = None
        """If it was started early. See Note [A third early]."""
        self._error: BaseException | None = None
        self._issued = threading.Event()

    def run(self) -> None:
        """Everything up to the start of a gather."""
        try:
            self._reduction.wait()
            if not self._iteration.failed:
                self._engine.update([self._bucket])
                if self._bucket % 3 == 0 and self._bucket + 1 < self._engine.bucket_count:
                    self.gather = self._engine.gather(self._bucket)
        except BaseException as error:  # whoever waits must hear of it, and the thread live on
            self._error = error
            self._iteration.failed = True
        finally:
            self._issued.set()

    def wait(self) -> None:
        """In the step: until it is stepped. Ends, since every wait of the thread ends by its timeout."""
        if self is self._iteration.waiting:
            self.run()
        self._issued.wait()
        if self._error is not None:
            raise self._error


def _serve(queue: SimpleQueue[_SteppedBucket | None]) -> None:
    import torch

    with torch.no_grad():
        while (stepped := queue.get()) is not None:
            stepped.run()
            del stepped  # kept until the next one comes, it would keep its engine alive

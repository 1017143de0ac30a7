"""The priority schedule: reductions first, then gathers in the order of the next forward, overlapping with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from shardrt import ScheduleRecord, hookimpl
from shardrt.comm.waiting import has_arrived, start_and_wait
from shardrt.protocols import Schedule, StepEngine, Work

SHARDRT_HOOK_VERSION = "1.0"


@hookimpl
def shardrt_schedules() -> Iterator[ScheduleRecord]:
    """Offer ``priority``."""
    yield ScheduleRecord(
        name="priority", summary="reduce during backward, gather during the next forward", factory=_make
    )


def _make() -> Schedule:
    return PrioritySchedule()


class PrioritySchedule:
    """Reductions overlap with backward and have the wires for themselves; gathers overlap with the next forward.

    Nothing is updated before ``step``, so clipping, scaling and several backwards before a step work as ever.
    """

    name = "priority"
    bucket_mb: float | None = 12.0
    gathers_apart = False
    updates_early = False

    def bucket_ready(self, engine: StepEngine, bucket: int) -> None:
        """Start the reduction; who waits for it is the step."""
        engine.reduce(bucket)

    def step(self, engine: StepEngine) -> None:
        """Update everything; leave the gathers to whoever reads the parameters.

        What is read first was reduced last, and goes on its way as soon as it is updated. Until its gradients have come
        the rest is updated, from the end: so the wires have always something to carry.
        """
        reductions: list[Work] = []
        try:
            reductions.extend(engine.reduce(bucket) for bucket in range(engine.bucket_count))
            order = engine.reading_order()
            left = list(order)
            for bucket in order:
                while len(left) > 1 and not has_arrived(reductions[bucket]) and has_arrived(reductions[left[-1]]):
                    _update(engine, left.pop(), reductions)
                if bucket in left:
                    left.remove(bucket)
                    _update(engine, bucket, reductions)
                engine.gather_for_readers(bucket)
        except Exception:
            with suppress(Exception):  # the first error is the one that matters, and it is on its way
                start_and_wait(reductions.__getitem__, range(len(reductions)))
            raise


def _update(engine: StepEngine, bucket: int, reductions: Sequence[Work]) -> None:
    reductions[bucket].wait()
    engine.update([bucket])

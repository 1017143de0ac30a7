"""The priority schedule: reductions first, then gathers in the order of the next forward, overlapping with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from shardrt import ScheduleRecord, hookimpl
from shardrt.comm.waiting import start_and_wait
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
        """Update everything; leave the gathers to whoever reads the parameters."""
        reductions: list[Work] = []
        try:
            reductions.extend(engine.reduce(bucket) for bucket in range(engine.bucket_count))
            for bucket, reduction in enumerate(reductions):
                reduction.wait()
                engine.update([bucket])
        except Exception:
            with suppress(Exception):  # the first error is the one that matters, and it is on its way
                start_and_wait(reductions.__getitem__, range(len(reductions)))
            raise
        for bucket in engine.reading_order():
            engine.gather_for_readers(bucket)

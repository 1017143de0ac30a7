"""The sync schedule: reduce, step and gather inside the step, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from shardrt import ScheduleRecord, hookimpl
from shardrt.comm.waiting import start_and_wait
from shardrt.protocols import Schedule, StepEngine, Work

SHARDRT_HOOK_VERSION = "1.0"


@hookimpl
def shardrt_schedules() -> Iterator[ScheduleRecord]:
    """Offer ``sync``."""
    yield ScheduleRecord(name="sync", summary="reduce, step and gather inside the step", factory=_make)


def _make() -> Schedule:
    return SyncSchedule()


class SyncSchedule:
    """Nothing overlaps with backward, so one bucket per dtype is best: fewest messages, and all wires are busy.

    Where there are several all the same, the next bucket is reduced while one is updated, and the one before is
    gathered: reduced gradients of two buckets are in memory, not of all.
    """

    name = "sync"
    bucket_mb: float | None = None

    def step(self, engine: StepEngine) -> None:
        """See :class:`shardrt.protocols.Schedule`."""
        count = engine.bucket_count
        if count < 2:
            start_and_wait(engine.reduce, range(count))
            engine.update()
            start_and_wait(engine.gather, range(count))
            return
        reductions: list[Work] = []
        try:
            reductions.append(engine.reduce(0))
            start_and_wait(lambda bucket: _in_turn(engine, bucket, reductions), range(count))
        except Exception:
            with suppress(Exception):  # the first error is the one that matters, and it is on its way
                start_and_wait(reductions.__getitem__, range(len(reductions)))
            raise


def _in_turn(engine: StepEngine, bucket: int, reductions: list[Work]) -> Work:
    if bucket + 1 < engine.bucket_count:
        reductions.append(engine.reduce(bucket + 1))
    reductions[bucket].wait()
    engine.update([bucket])
    return engine.gather(bucket)

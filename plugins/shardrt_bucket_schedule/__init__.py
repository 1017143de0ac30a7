"""The bucket schedule: reductions run during backward, and each bucket is stepped as its reduction arrives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from shardrt import ScheduleRecord, hookimpl
from shardrt.comm.waiting import start_and_wait
from shardrt.protocols import Schedule, StepEngine, Work

SHARDRT_HOOK_VERSION = "1.0"


@hookimpl
def shardrt_schedules() -> Iterator[ScheduleRecord]:
    """Offer ``bucket``."""
    yield ScheduleRecord(
        name="bucket", summary="reduce during backward, then step each bucket as it arrives", factory=_make
    )


def _make() -> Schedule:
    return BucketSchedule()


class BucketSchedule:
    """Reductions overlap with backward; steps overlap with the reductions and gathers still under way.

    Nothing is updated before ``step``, so clipping and several backwards before a step work as ever.
    """

    name = "bucket"
    bucket_mb: float | None = 8.0
    gathers_apart = False
    updates_early = False

    def bucket_ready(self, engine: StepEngine, bucket: int) -> None:
        """Start the reduction; who waits for it is the step."""
        engine.reduce(bucket)

    def step(self, engine: StepEngine) -> None:
        """See :class:`shardrt.protocols.Schedule`."""
        # All reductions are issued before the first gather: the one order that every rank keeps, whether its
        # reductions were started in backward or only now.
        reductions: list[Work] = []
        try:
            reductions.extend(engine.reduce(bucket) for bucket in range(engine.bucket_count))
            start_and_wait(lambda bucket: _step_and_gather(engine, bucket, reductions), range(engine.bucket_count))
        except Exception:
            with suppress(Exception):  # the first error is the one that matters, and it is on its way
                start_and_wait(reductions.__getitem__, range(len(reductions)))
            raise


def _step_and_gather(engine: StepEngine, bucket: int, reductions: list[Work]) -> Work:
    reductions[bucket].wait()
    engine.update([bucket])
    return engine.gather(bucket)

"""The sync schedule: reduce everything, step, gather everything."""

from __future__ import annotations

from collections.abc import Iterator

from shardrt import ScheduleRecord, hookimpl
from shardrt.comm.waiting import start_and_wait
from shardrt.protocols import Schedule, StepEngine

SHARDRT_HOOK_VERSION = "1.0"


@hookimpl
def shardrt_schedules() -> Iterator[ScheduleRecord]:
    """Offer ``sync``."""
    yield ScheduleRecord(name="sync", summary="reduce, step and gather one after the other", factory=_make)


def _make() -> Schedule:
    return SyncSchedule()


class SyncSchedule:
    """Nothing overlaps with backward, so one bucket per dtype is best: fewest messages, and all wires are busy."""

    name = "sync"
    bucket_mb: float | None = None

    def step(self, engine: StepEngine) -> None:
        """See :class:`shardrt.protocols.Schedule`."""
        start_and_wait(engine.reduce, range(engine.bucket_count))
        engine.update()
        start_and_wait(engine.gather, range(engine.bucket_count))

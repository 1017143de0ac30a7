"""The interleaved schedule: each bucket is reduced, stepped and gathered while backward goes on."""

from __future__ import annotations

from collections.abc import Iterator

from shardrt import ScheduleRecord, hookimpl
from shardrt.protocols import Schedule

SHARDRT_HOOK_VERSION = "1.0"


@hookimpl
def shardrt_schedules() -> Iterator[ScheduleRecord]:
    """Offer ``interleaved``."""
    yield ScheduleRecord(
        name="interleaved", summary="reduce, step and gather each bucket while backward goes on", factory=_make
    )


def _make() -> Schedule:
    from shardrt_interleaved.schedule import InterleavedSchedule

    return InterleavedSchedule()

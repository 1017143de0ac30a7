"""The gloo backend and the sync schedule pass the same kit as a third party's."""

from __future__ import annotations

from typing import Any

from shardrt_bucket_schedule import BucketSchedule
from shardrt_gloo.communicator import GlooCommunicator
from shardrt_interleaved.schedule import InterleavedSchedule
from shardrt_priority import PrioritySchedule
from shardrt_sync import SyncSchedule

from shardrt import Group
from shardrt.testing import BackendConformance, ScheduleConformance


class TestGloo(BackendConformance):
    @classmethod
    def make(cls, group: Group) -> Any:
        return GlooCommunicator(group)


class TestGlooInSmallChunks(BackendConformance):
    """Chunks smaller than the buffers, so that reductions run through many of them."""

    @classmethod
    def make(cls, group: Group) -> Any:
        return GlooCommunicator(group, chunk_mb=0.01)


class TestBucket(ScheduleConformance):
    @classmethod
    def make(cls) -> Any:
        return BucketSchedule()


class TestInterleaved(ScheduleConformance):
    @classmethod
    def make(cls) -> Any:
        return InterleavedSchedule()


class TestSync(ScheduleConformance):
    @classmethod
    def make(cls) -> Any:
        return SyncSchedule()


class TestPriority(ScheduleConformance):
    @classmethod
    def make(cls) -> Any:
        return PrioritySchedule()

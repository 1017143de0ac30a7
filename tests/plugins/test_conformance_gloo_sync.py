"""The gloo backend and the sync schedule pass the same kit as a third party's."""

from __future__ import annotations

from typing import Any

from shardrt_bucket_schedule import BucketSchedule
from shardrt_gloo.opening import open_communicator
from shardrt_interleaved.schedule import InterleavedSchedule
from shardrt_priority import PrioritySchedule
from shardrt_sync import SyncSchedule

from shardrt import Group
from shardrt.testing import BackendConformance, ScheduleConformance


class TestGloo(BackendConformance):
    @classmethod
    def make(cls, group: Group) -> Any:
        return open_communicator(group)


class TestGlooInSmallChunks(BackendConformance):
    """Chunks smaller than the buffers, so that reductions run through many of them."""

    @classmethod
    def make(cls, group: Group) -> Any:
        return open_communicator(group, chunk_mb=0.01)


class TestGlooMessages(BackendConformance):
    """Where ranks cannot connect to one another beside Gloo."""

    @classmethod
    def make(cls, group: Group) -> Any:
        return open_communicator(group, connections="gloo")


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

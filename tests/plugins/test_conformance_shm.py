"""The shm backend passes the same kit as every other, through slots of any size and in shared memory."""

from __future__ import annotations

from typing import Any

from shardrt_shm.communicator import ShmCommunicator

from shardrt import Group
from shardrt.testing import BackendConformance


class TestShm(BackendConformance):
    world_sizes = (2,)

    @classmethod
    def make(cls, group: Group) -> Any:
        return ShmCommunicator(group)


class TestShmInSmallSlots(BackendConformance):
    """Slots smaller than the buffers, so that every operation takes many steps."""

    world_sizes = (3,)

    @classmethod
    def make(cls, group: Group) -> Any:
        return ShmCommunicator(group, chunk_mb=0.001)

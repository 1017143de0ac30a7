"""The null and the reference backend pass the same kit as anyone's."""

from __future__ import annotations

from shardrt.protocols import Communicator, Group
from shardrt.testing import BackendConformance


class TestNull(BackendConformance):
    name = "null"
    world_sizes = (1,)
    process_group = None

    @classmethod
    def make(cls, group: Group) -> Communicator:
        import shardrt_null

        return shardrt_null.make(group)


class TestReference(BackendConformance):
    name = "reference"

    @classmethod
    def make(cls, group: Group) -> Communicator:
        import shardrt_reference

        return shardrt_reference.make(group)

"""The backend of a single process: nothing travels. Also the fast oracle of the conformance kit on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import shardrt

if TYPE_CHECKING:
    from shardrt.protocols import Communicator, Group

SHARDRT_HOOK_VERSION = "1.0"


def make(group: Group) -> Communicator:
    """A communicator for a group of one."""
    from shardrt_null.communicator import NullCommunicator

    return NullCommunicator(group)


@shardrt.hookimpl
def shardrt_backends() -> Iterator[shardrt.BackendRecord]:
    """One record for every device type."""
    yield shardrt.BackendRecord(
        name="null",
        device_type="*",
        summary="one process, nothing travels: every collective is the identity",
        factory=make,
        priority=1000,
        world_sizes=(1, 1),
    )

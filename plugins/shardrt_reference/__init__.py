"""The slow, obvious backend that fast ones are compared with: everybody sends everything to everybody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import shardrt

if TYPE_CHECKING:
    from shardrt.protocols import Communicator, Group

SHARDRT_HOOK_VERSION = "1.0"


def make(group: Group) -> Communicator:
    """A communicator on the group's torch process group."""
    from shardrt_reference.communicator import ReferenceCommunicator

    return ReferenceCommunicator(group)


@shardrt.hookimpl
def shardrt_backends() -> Iterator[shardrt.BackendRecord]:
    """One record for every device type; never chosen by ``auto``."""
    yield shardrt.BackendRecord(
        name="reference",
        device_type="*",
        summary="slow and obvious: gathers every input everywhere and computes the answer by definition",
        factory=make,
        process_group="gloo",
        priority=0,
    )

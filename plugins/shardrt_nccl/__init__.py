"""The ``nccl`` backend: NVIDIA's collectives (AMD's RCCL answers to the same name) on ``cuda`` devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import shardrt
from shardrt.protocols import Communicator, Group
from shardrt_nccl.capabilities import CAPABILITIES
from shardrt_nccl.probing import probe

SHARDRT_HOOK_VERSION = "1.0"

__all__ = ["CAPABILITIES", "make", "probe", "shardrt_backends"]


def make(group: Group, *, ops: Any = None) -> Communicator:
    """A communicator over the group's NCCL process group; ``ops`` stands in for torch.distributed in tests."""
    from shardrt.comm import CollectiveCommunicator

    return CollectiveCommunicator(group, capabilities=CAPABILITIES, ops=ops, name="nccl")


@shardrt.hookimpl
def shardrt_backends() -> Iterator[shardrt.BackendRecord]:
    """One record, for ``cuda``."""
    yield shardrt.BackendRecord(
        name="nccl",
        summary="NCCL on NVIDIA and AMD GPUs",
        device_type="cuda",
        process_group="nccl",
        priority=100,
        factory=make,
        probe=probe,
    )

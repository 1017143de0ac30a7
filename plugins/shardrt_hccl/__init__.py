"""The ``hccl`` backends. Two vendors use the name: Huawei on Ascend (``npu``) and Intel on Gaudi (``hpu``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import shardrt
from shardrt.protocols import Communicator, Group
from shardrt_hccl import ascend, habana

SHARDRT_HOOK_VERSION = "1.0"

__all__ = ["ascend", "habana", "make_ascend", "make_habana", "shardrt_backends"]


def make_ascend(group: Group, *, ops: Any = None) -> Communicator:
    """A communicator over the group's HCCL process group on Ascend; ``ops`` stands in for torch.distributed."""
    from shardrt.comm import CollectiveCommunicator

    return CollectiveCommunicator(group, capabilities=ascend.CAPABILITIES, ops=ops, name="hccl")


def make_habana(group: Group, *, ops: Any = None) -> Communicator:
    """A communicator over the group's HCCL process group on Gaudi; ``ops`` stands in for torch.distributed."""
    from shardrt.comm import CollectiveCommunicator

    return CollectiveCommunicator(group, capabilities=habana.CAPABILITIES, ops=ops, name="hccl", pack_all_to_all=True)


@shardrt.hookimpl
def shardrt_backends() -> Iterator[shardrt.BackendRecord]:
    """One record for each vendor."""
    yield shardrt.BackendRecord(
        name="hccl",
        summary="HCCL on Huawei Ascend NPUs",
        device_type="npu",
        process_group="hccl",
        priority=100,
        needs=("torch-npu",),
        factory=make_ascend,
        probe=ascend.probe,
        prepare=ascend.prepare,
    )
    yield shardrt.BackendRecord(
        name="hccl",
        summary="HCCL on Intel Gaudi HPUs",
        device_type="hpu",
        process_group="hccl",
        priority=100,
        needs=("habana-torch-plugin",),
        factory=make_habana,
        probe=habana.probe,
        prepare=habana.prepare,
    )

"""Whole parameters, largest first, balanced by a cost of the user's choice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardrt.registry import PartitionerRecord, hookimpl

if TYPE_CHECKING:
    from shardrt_greedy.partitioner import GreedyPartitioner

SHARDRT_HOOK_VERSION = "1.0"


def _make(**options: Any) -> GreedyPartitioner:
    from shardrt_greedy.partitioner import GreedyPartitioner

    return GreedyPartitioner(**options)


@hookimpl
def shardrt_partitioners() -> Iterable[PartitionerRecord]:
    """One record: ``greedy``."""
    yield PartitionerRecord(name="greedy", summary="whole parameters, largest first, by a chosen cost", factory=_make)

"""All parameters end to end, cut into even contiguous ranges."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardrt.registry import PartitionerRecord, hookimpl

if TYPE_CHECKING:
    from shardrt_flat.partitioner import FlatPartitioner

SHARDRT_HOOK_VERSION = "1.0"


def _make(**options: Any) -> FlatPartitioner:
    from shardrt_flat.partitioner import FlatPartitioner

    return FlatPartitioner(**options)


@hookimpl
def shardrt_partitioners() -> Iterable[PartitionerRecord]:
    """One record: ``flat``."""
    yield PartitionerRecord(name="flat", summary="even contiguous ranges of all parameters end to end", factory=_make)

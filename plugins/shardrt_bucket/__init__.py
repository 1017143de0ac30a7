"""The buckets that travel, split evenly over the ranks or given to them whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardrt.registry import PartitionerRecord, hookimpl

if TYPE_CHECKING:
    from shardrt_bucket.partitioner import BucketPartitioner

SHARDRT_HOOK_VERSION = "1.0"


def _make(**options: Any) -> BucketPartitioner:
    from shardrt_bucket.partitioner import BucketPartitioner

    return BucketPartitioner(**options)


@hookimpl
def shardrt_partitioners() -> Iterable[PartitionerRecord]:
    """One record: ``bucket``."""
    yield PartitionerRecord(name="bucket", summary="each bucket split evenly over the ranks, or whole", factory=_make)

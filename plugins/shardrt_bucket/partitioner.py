"""Partitions along the buckets that travel, so that every reduction and every gather is even."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from shardrt.errors import ConfigError, UnsupportedError
from shardrt.plan import (
    BLOCK,
    EvenCutter,
    ParamSpec,
    Partition,
    Shard,
    group_for_travel,
    refuse_unknown_options,
    spread_largest_first,
    starting_loads,
)
from shardrt.protocols import PartitionRequest


class BucketPartitioner:
    """Splits each bucket evenly over the ranks, or gives each bucket whole to one rank.

    Split, every bucket's reduction and gather is even, at the price of slices: the last rank's run of one bucket ends
    where the bucket ends. Whole (``split=False``), the largest bucket left goes to the rank that owns least, and
    with fewer buckets than ranks some ranks own nothing. Frozen parameters, which do not travel, are grouped and
    spread by the same rules after the trained ones. ``align`` is that of the ``flat`` partitioner.

    Example:
        >>> from shardrt import ParamSpec, PartitionRequest
        >>> from shardrt_bucket.partitioner import BucketPartitioner
        >>> params = tuple(ParamSpec(name=name, shape=(4,), dtype="float32") for name in "abc")
        >>> request = PartitionRequest(params=params, world_size=2, bucket_bytes=32)
        >>> [(shard.param, shard.rank) for shard in BucketPartitioner().partition(request).shards]
        [('a', 0), ('a', 1), ('b', 0), ('c', 1)]
        >>> [(shard.param, shard.rank) for shard in BucketPartitioner(split=False).partition(request).shards]
        [('a', 1), ('b', 0), ('c', 0)]
    """

    name = "bucket"

    def __init__(self, *, split: bool = True, align: int = BLOCK, **unknown: Any) -> None:
        refuse_unknown_options("bucket", unknown, known=("split", "align"))
        if not isinstance(split, bool):
            raise ConfigError(f"split of bucket must be true or false, got {split!r}")
        if type(align) is not int or align < 1:
            raise ConfigError(f"align of bucket must be a number of elements from 1 up, got {align!r}")
        self.split = split
        self.align = align
        self.cuts_parameters = split

    def partition(self, request: PartitionRequest) -> Partition:
        """Cover the request bucket by bucket, in the order of its parameters."""
        if request.whole_parameters and self.split:
            raise UnsupportedError(
                "bucket cuts parameters into ranges, but the update of this optimizer needs whole parameters; "
                "use bucket with split=False, or partitioner='greedy'"
            )
        owned = starting_loads(request.world_size, request.load)
        trained = [spec for spec in request.params if spec.trainable]
        frozen = [spec for spec in request.params if not spec.trainable]
        groups = group_for_travel(trained, request.bucket_bytes)
        frozen_groups = group_for_travel(frozen, request.bucket_bytes)
        if self.split:
            shards = self._cut([*groups, *frozen_groups], owned)
        else:
            # In this order: what travels is balanced first, and the frozen groups fill up on top of it.
            shards = chain(self._give(groups, owned), self._give(frozen_groups, owned))
        return Partition.arranged(request.params, request.world_size, shards)

    def _cut(self, groups: Sequence[Sequence[ParamSpec]], owned: Sequence[int]) -> Iterator[Shard]:
        # Who owns least gets the first leftover element.
        cutter = EvenCutter(world_size=len(owned), align=self.align, first=owned.index(min(owned)))
        return chain.from_iterable(map(cutter.cut, groups))

    def _give(self, groups: Sequence[Sequence[ParamSpec]], owned: list[int]) -> Iterator[Shard]:
        """Whole groups, largest first; ``owned`` grows by what each rank is given."""
        sizes = [sum(spec.nbytes for spec in group) for group in groups]
        for group, size, rank in zip(groups, sizes, spread_largest_first(sizes, owned), strict=True):
            owned[rank] += size
            for spec in group:
                yield Shard(spec.name, 0, spec.numel, rank)

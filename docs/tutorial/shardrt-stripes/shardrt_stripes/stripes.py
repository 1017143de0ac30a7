"""The partitioner ``stripes``: stripes of one size, dealt out to the ranks in turn."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from shardrt import Partition, PartitionerRecord, PartitionRequest, Shard, hookimpl
from shardrt.errors import ConfigError
from shardrt.plan import starting_loads

SHARDRT_HOOK_VERSION = "1.0"


@hookimpl
def shardrt_partitioners() -> Iterator[PartitionerRecord]:
    """Offer ``stripes``."""
    yield PartitionerRecord(
        name="stripes", summary="stripes of one size, dealt out to the ranks in turn", factory=StripesPartitioner
    )


class StripesPartitioner:
    """Cuts parameters into stripes of ``size`` elements; whole parameters, where it must not cut, are dealt out alike.

    Example:
        >>> from shardrt import ParamSpec, PartitionRequest
        >>> from shardrt_stripes.stripes import StripesPartitioner
        >>> request = PartitionRequest(params=(ParamSpec(name="w", shape=(5, 2), dtype="float32"),), world_size=2)
        >>> [(shard.start, shard.stop, shard.rank) for shard in StripesPartitioner(size=4).partition(request).shards]
        [(0, 4, 0), (4, 8, 1), (8, 10, 0)]
    """

    name = "stripes"
    cuts_parameters = True

    def __init__(self, *, size: int = 65536) -> None:
        if type(size) is not int or size < 1:
            raise ConfigError(f"size of stripes must be a number of elements from 1 up, got {size!r}")
        self.size = size

    def partition(self, request: PartitionRequest) -> Partition:
        """Deal out one stripe after the other, starting with the rank that owns least."""
        loads = starting_loads(request.world_size, request.load)
        turns = count(loads.index(min(loads)))
        shards = []
        for spec in request.params:
            size = spec.numel if request.whole_parameters else self.size
            # At least one stripe: a parameter without elements has an owner too.
            for start in range(0, max(spec.numel, 1), max(size, 1)):
                stop = min(start + size, spec.numel)
                shards.append(Shard(spec.name, start, stop, next(turns) % request.world_size))
        return Partition(world_size=request.world_size, shards=tuple(shards))

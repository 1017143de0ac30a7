"""Even contiguous ranges, for each dtype and for trained and frozen parameters on their own."""

from __future__ import annotations

from itertools import chain
from typing import Any

from shardrt.errors import ConfigError, UnsupportedError
from shardrt.plan import BLOCK, EvenCutter, ParamSpec, Partition, refuse_unknown_options, starting_loads
from shardrt.protocols import PartitionRequest


class FlatPartitioner:
    """Lays parameters end to end and gives each rank an even run, ranks ascending.

    Parameters of one dtype are cut among themselves, since they travel together, and trained ones apart from frozen
    ones, so that optimizer state is even. Cuts fall on multiples of ``align`` elements from a parameter's start (or on
    its end): with the default of 64 an elementwise optimizer computes the same bits as on whole parameters. Runs are
    off by at most ``align`` elements; small models are cut more finely. ``align=1`` cuts to the element.

    Example:
        >>> from shardrt import ParamSpec, PartitionRequest
        >>> from shardrt_flat.partitioner import FlatPartitioner
        >>> request = PartitionRequest(params=(ParamSpec(name="w", shape=(1024, 2), dtype="float32"),), world_size=3)
        >>> [shard.numel for shard in FlatPartitioner().partition(request).shards]
        [704, 640, 704]
        >>> [shard.numel for shard in FlatPartitioner(align=1).partition(request).shards]
        [683, 683, 682]
    """

    name = "flat"
    cuts_parameters = True

    def __init__(self, *, align: int = BLOCK, **unknown: Any) -> None:
        refuse_unknown_options("flat", unknown, known=("align",))
        if type(align) is not int or align < 1:
            raise ConfigError(f"align of flat must be a number of elements from 1 up, got {align!r}")
        self.align = align

    def partition(self, request: PartitionRequest) -> Partition:
        """Cover the request with ranges, in the order of its parameters."""
        if request.whole_parameters:
            raise UnsupportedError(
                "flat cuts parameters into ranges, but the update of this optimizer needs whole parameters; "
                "use partitioner='greedy'"
            )
        owned = starting_loads(request.world_size, request.load)
        classes: dict[tuple[str, bool], list[ParamSpec]] = {}
        for spec in request.params:
            classes.setdefault((spec.dtype, spec.trainable), []).append(spec)
        # Who owns least gets the first leftover element.
        cutter = EvenCutter(world_size=request.world_size, align=self.align, first=owned.index(min(owned)))
        shards = chain.from_iterable(map(cutter.cut, classes.values()))
        return Partition.arranged(request.params, request.world_size, shards)

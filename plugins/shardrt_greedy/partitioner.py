"""Largest first onto the lightest rank, whole parameters only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardrt.errors import ConfigError
from shardrt.plan import (
    ParamSpec,
    Partition,
    Shard,
    refuse_unknown_choice,
    refuse_unknown_options,
    spread_largest_first,
    starting_loads,
)
from shardrt.protocols import PartitionRequest
from shardrt_greedy.costs import COSTS, IN_BYTES, weighed_by


class GreedyPartitioner:
    """Gives every parameter whole to one rank, balanced by a cost.

    ``cost`` is ``"trainable"`` (bytes of trained parameters), ``"elements"``, ``"bytes"`` or ``"matrix"`` (work of a
    whole-matrix optimizer such as Muon); ``costs`` is a function from :class:`~shardrt.ParamSpec` to a number that
    takes its place. What costs nothing (frozen parameters, under two of the four) is spread afterwards by bytes, on top
    of all that a rank owns, so that a later thaw finds it balanced.

    The owner of a parameter depends on the names, shapes and dtypes there are, never on their order. Bytes that ranks
    own already (``request.load``) count as the start of their load where the cost is in bytes; other costs start from
    zero and prefer, among ranks of one load, those that own fewer bytes.

    Example:
        >>> from shardrt import ParamSpec, PartitionRequest
        >>> from shardrt_greedy.partitioner import GreedyPartitioner
        >>> sizes = {"embed": 8, "up": 5, "down": 4}
        >>> params = tuple(ParamSpec(name=name, shape=(size,), dtype="float32") for name, size in sizes.items())
        >>> partition = GreedyPartitioner().partition(PartitionRequest(params=params, world_size=2))
        >>> [(shard.param, shard.rank) for shard in partition.shards]
        [('embed', 0), ('up', 1), ('down', 1)]
    """

    name = "greedy"
    cuts_parameters = False

    def __init__(
        self, *, cost: str = "trainable", costs: Callable[[ParamSpec], float] | None = None, **unknown: Any
    ) -> None:
        refuse_unknown_options("greedy", unknown, known=("cost", "costs"))
        refuse_unknown_choice("cost of greedy", cost, known=COSTS)
        if costs is not None and not callable(costs):
            raise ConfigError(f"costs of greedy must be a function from ParamSpec to a number, got {costs!r}")
        if costs is not None and cost != "trainable":
            raise ConfigError(f"greedy takes cost={cost!r} or costs=..., not both: leave out one of them")
        self.cost = cost
        self.costs = costs

    def partition(self, request: PartitionRequest) -> Partition:
        """Cover the request with one whole shard per parameter, in the order of its parameters."""
        owned = starting_loads(request.world_size, request.load)
        owners = self._owners(request.params, owned)
        return Partition(
            world_size=request.world_size,
            shards=tuple(
                Shard(spec.name, 0, spec.numel, rank) for spec, rank in zip(request.params, owners, strict=True)
            ),
        )

    def _owners(self, specs: Sequence[ParamSpec], owned: list[int]) -> list[int]:
        """The rank of each parameter. ``owned`` is bytes by rank."""
        costs = self._weigh(specs)
        loads = owned if self.costs is None and self.cost in IN_BYTES else [0] * len(owned)
        names = [spec.name for spec in specs]
        by_name = sorted(range(len(specs)), key=names.__getitem__)  # the same start whatever the order of the input
        owners = [0] * len(specs)

        priced = [index for index in by_name if costs[index]]
        ranks = spread_largest_first([costs[index] for index in priced], loads, preferred=owned)
        for index, rank in zip(priced, ranks, strict=True):
            owners[index] = rank

        free = [index for index in by_name if not costs[index]]
        if free:
            owned = list(owned)
            for index in priced:
                owned[owners[index]] += specs[index].nbytes
            ranks = spread_largest_first([specs[index].nbytes for index in free], owned)
            for index, rank in zip(free, ranks, strict=True):
                owners[index] = rank
        return owners

    def _weigh(self, specs: Sequence[ParamSpec]) -> list[int]:
        if self.costs is not None:
            return weighed_by(self.costs, specs)
        return list(map(COSTS[self.cost], specs))

"""From parameter specifications to a checked plan, for one optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from shardrt.errors import PlanError, UnsupportedError
from shardrt.optim.reach import Reach
from shardrt.plan import ParamSpec, Partition, Plan, Shard
from shardrt.protocols import Partitioner, PartitionRequest


@attrs.frozen(kw_only=True)
class Planner:
    """A partitioner together with what it must respect for one optimizer."""

    partitioner: Partitioner
    world_size: int
    bucket_bytes: int | None
    optimizer_class: type[torch.optim.Optimizer]
    reach: Reach
    units: tuple[tuple[str, ...], ...] | None = None
    """Parameters that are gathered together, by their names; each unit is divided among the ranks by itself."""

    def plan(self, specs: Sequence[ParamSpec]) -> Plan:
        """A new plan."""
        return self._build(specs, self._partition(specs) if self.units is None else self._by_units(specs, self.units))

    def check_extensible(self) -> None:
        """Raise unless parameters can be added."""
        if self.units is not None:
            raise UnsupportedError(
                "parameters cannot be added to a sharded module's optimizer, since no unit gathers them; build the "
                "whole module first, and shard it then"
            )

    def extended(self, plan: Plan, specs: Sequence[ParamSpec]) -> Plan:
        """More parameters; owners of the earlier ones stay."""
        added = self._partition(specs, load=plan.bytes_per_rank)
        return self._build((*plan.params, *specs), plan.partition.joined_with(added))

    def relaid(self, plan: Plan, specs: Sequence[ParamSpec]) -> Plan:
        """The same parameters, of which others are trained now; owners stay."""
        return self._build(specs, plan.partition)

    def _build(self, specs: Sequence[ParamSpec], partition: Partition) -> Plan:
        return Plan.build(
            specs, partition, partitioner=self.partitioner.name, bucket_bytes=self.bucket_bytes, units=self.units
        )

    def _by_units(self, specs: Sequence[ParamSpec], units: Sequence[Sequence[str]]) -> Partition:
        """Each unit by itself, so that every rank has a part of each; leftovers go to those who own least."""
        named = {spec.name: spec for spec in specs}
        load = [0] * self.world_size
        shards: list[Shard] = []
        for unit in units:
            partition = self._partition([named[name] for name in unit], load=tuple(load))
            shards += partition.shards
            for shard in partition.shards:
                load[shard.rank] += shard.numel * named[shard.param].itemsize
        return Partition.arranged(specs, self.world_size, shards)

    def _partition(self, specs: Sequence[ParamSpec], load: tuple[int, ...] = ()) -> Partition:
        whole = self.reach is not Reach.ELEMENT
        request = PartitionRequest(
            params=tuple(specs),
            world_size=self.world_size,
            whole_parameters=whole,
            bucket_bytes=self.bucket_bytes,
            load=load,
        )
        try:
            partition = self.partitioner.partition(request)
        except UnsupportedError as error:
            if not whole:
                raise
            raise UnsupportedError(
                f"{self.optimizer_class.__name__} needs whole parameters, since its update is not known to be "
                f"elementwise: {error}; if its update of an element looks at that element alone, say so: "
                "rt.optimizer(..., elementwise=True)"
            ) from error
        if not isinstance(partition, Partition):
            raise PlanError(
                f"partitioner {self.partitioner.name!r} returned a {type(partition).__name__} instead of a Partition"
            )
        if partition.world_size != self.world_size:
            raise PlanError(
                f"partitioner {self.partitioner.name!r} gave a partition for {partition.world_size} ranks "
                f"when asked for {self.world_size}"
            )
        if whole and any(len(shards) > 1 for shards in partition.by_param.values()):
            raise PlanError(
                f"partitioner {self.partitioner.name!r} cut parameters although {self.optimizer_class.__name__} needs "
                "them whole; use partitioner='greedy'"
            )
        return partition

"""How an optimizer comes to be: read parameters, plan, agree with the other ranks, build, start from equal values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardrt.errors import ConfigError, UnsupportedError
from shardrt.handshake import Field
from shardrt.optim.agreement import optimizer_fields
from shardrt.optim.engine import Gradients
from shardrt.optim.initial import settle_initial_values
from shardrt.optim.lone import LoneOptimizer
from shardrt.optim.managed import ManagedOptimizer
from shardrt.optim.mesh import Mesh
from shardrt.optim.params import NamedParam, check_no_aliases, read_groups
from shardrt.optim.planner import Planner
from shardrt.optim.reach import check_shardable, reach_of
from shardrt.optim.residence import RESIDENT, PrecisionOf, Residence, own_precision
from shardrt.optim.sharded import ShardedOptimizer
from shardrt.optim.uses import check_uses
from shardrt.optim.wires import Wires
from shardrt.plan import Plan, Shard
from shardrt.protocols import Communicator, OverlappingSchedule, Partitioner

if TYPE_CHECKING:
    from shardrt.runtime import Runtime


Materialise = Callable[[Plan, Communicator], Mapping[Shard, torch.Tensor]]
"""Gives parameters on the meta device values; returns this rank's shards of those that then go again."""


def build_optimizer(
    runtime: Runtime,
    params: Any,
    optimizer_class: type[torch.optim.Optimizer],
    *,
    gradients: Gradients,
    elementwise: bool | None,
    initial: str,
    uses: Sequence[str],
    defaults: Mapping[str, Any],
    partitioner: Partitioner | None = None,
    units: tuple[tuple[str, ...], ...] | None = None,
    bucket_bytes: int | None = None,
    residence: Residence = RESIDENT,
    precision: PrecisionOf = own_precision,
    materialise: Materialise | None = None,
    mesh: Mesh | None = None,
) -> ManagedOptimizer:
    """See :meth:`shardrt.Runtime.optimizer`; and, for the rest, :meth:`shardrt.Runtime.shard`."""
    with runtime.agreeing("optimizer") as fields:
        _check_choice("gradients", gradients, ("average", "sum", "reduced"))
        _check_choice("initial", initial, ("broadcast", "check"))
        _check_class(optimizer_class)
        check_uses(runtime.schedule, uses, runtime.world_size)
        if elementwise is not None and not isinstance(elementwise, bool):
            raise ConfigError(f"elementwise={elementwise!r} is not possible; it is True, False or None (not known)")
        groups = read_groups(params, deferred=materialise is not None)
        named = [param for group in groups for param in group.params]
        reach = reach_of(optimizer_class, elementwise)
        if runtime.world_size > 1:
            check_shardable(optimizer_class, reach)
            check_no_aliases(named)
            _check_devices(named, runtime.device_type)
        planner = Planner(
            partitioner=partitioner or runtime.partitioner,
            units=units,
            world_size=runtime.world_size if mesh is None else len(mesh.shard_group),
            bucket_bytes=bucket_bytes or runtime.bucket_bytes,
            optimizer_class=optimizer_class,
            reach=reach,
        )
        plan = planner.plan([param.spec() for param in named])
        dtypes = {spec.dtype for spec in plan.params}
        runtime.negotiate(dtypes)
        fields.update(optimizer_fields(plan, optimizer_class, defaults, groups, gradients))
        fields["initial"] = Field(value=initial, fix="pass the same initial=... on every rank")
    shards: Mapping[Shard, torch.Tensor] = {}
    if materialise is not None:
        with runtime.telling_peers():
            shards = materialise(plan, runtime.negotiate(dtypes))
    elif runtime.world_size > 1:
        settle_initial_values(runtime, runtime.negotiate(dtypes), named, initial)
    with runtime.agreeing("optimizer built"):
        if runtime.world_size == 1 and precision is own_precision and not residence.offload:
            return LoneOptimizer(runtime, planner, plan, groups, defaults)
        _retire_others(runtime, named)
        made = ShardedOptimizer(
            runtime,
            planner,
            plan,
            groups,
            defaults,
            wires=_wires(runtime, dtypes, residence, mesh),
            schedule=runtime.schedule,
            gradients=gradients,
            residence=residence,
            precision=precision,
            shards=shards,
        )
    with runtime.agreeing("buckets made"):
        made.make_buckets()
    return made


def _retire_others(runtime: Runtime, params: Sequence[NamedParam]) -> None:
    """Two that listen to the same backward would both reduce it, on some ranks only if the collector is done with the
    older one on the others."""
    if isinstance(runtime.schedule, OverlappingSchedule):
        tensors = {param.tensor for param in params}
        for other in runtime.living_optimizers():
            if isinstance(other, ShardedOptimizer) and tensors & other.trained():
                other.retire()


def _wires(runtime: Runtime, dtypes: set[str], residence: Residence, mesh: Mesh | None) -> Wires:
    if mesh is None:
        shared, gathers = _communicators(runtime, dtypes, residence)
        return Wires(shared=shared, gathers=gathers)
    return Wires(
        shared=runtime.open_among(mesh.groups, dtypes),
        gathers=None if residence.params else runtime.open_among(mesh.groups, dtypes),
        replicas=runtime.open_among(mesh.replica_groups, dtypes),
        everybody=runtime.open_communicator(dtypes) or runtime.negotiate(dtypes),
        mesh=mesh,
    )


def _communicators(
    runtime: Runtime, dtypes: set[str], residence: Residence
) -> tuple[Communicator, Communicator | None]:
    """One communicator per optimizer: backward may fill the buckets of two in an order that differs between ranks, and
    a loop that steps two in different orders ends in a timeout instead of in one another's data.
    """
    schedule = runtime.schedule
    if runtime.world_size == 1:
        return runtime.negotiate(dtypes), None
    own = runtime.open_communicator(dtypes)
    if own is not None:
        # Parameters that are gathered inside backward, where reductions are under way, must not queue behind them.
        apart = not residence.params or (isinstance(schedule, OverlappingSchedule) and schedule.gathers_apart)
        return own, runtime.open_communicator(dtypes) if apart else None
    early = isinstance(schedule, OverlappingSchedule) or not residence.gradients
    if early and runtime.has_optimizers():
        raise UnsupportedError(
            f"backend {runtime.backend!r} runs one communicator at a time, and schedule {schedule.name!r} works during "
            "backward, where the buckets of two optimizers come in no fixed order; use schedule='sync', or one "
            "optimizer with several parameter groups"
        )
    return runtime.negotiate(dtypes), None


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not possible; choose one of {', '.join(map(repr, allowed))}")


def _check_class(optimizer_class: object) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        hint = "; pass the class, not an instance" if isinstance(optimizer_class, torch.optim.Optimizer) else ""
        raise ConfigError(f"optimizer_class must be a torch.optim.Optimizer class, got {optimizer_class!r}{hint}")


def _check_devices(params: Sequence[NamedParam], device_type: str) -> None:
    for param in params:
        if not param.tensor.is_meta and param.tensor.device.type != device_type:
            raise ConfigError(
                f"parameter {param.name!r} is on {param.tensor.device}, but this runtime communicates for "
                f"{device_type}; move the model, or pass Runtime(device={param.tensor.device.type!r})"
            )

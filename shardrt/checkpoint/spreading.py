"""Which rank stores which part of a whole state: decided by a partitioner, without models and without ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from shardrt.errors import PlanError, StateError, UnsupportedError
from shardrt.optim.reach import Reach, reach_called
from shardrt.plan import ParamSpec, Partition, Plan, Shard
from shardrt.protocols import Partitioner, PartitionRequest
from shardrt.state.portable import LazyTensor, PortableOptimizer, PortableState


@attrs.frozen(kw_only=True)
class SpreadState:
    """Owners of everything."""

    models: Mapping[str, Mapping[str, tuple[Shard, ...]]]
    """By model and tensor, each tensor under its first name."""
    plans: Mapping[str, Plan]
    """By optimizer."""


def spread_state(
    state: PortableState, world_size: int, partitioner: Partitioner, *, elementwise: bool | None = None
) -> SpreadState:
    """Ask the partitioner for the parameters of each optimizer, then for those that no optimizer has.

    A model's tensor that is an optimizer's parameter is stored where that parameter's state is. Buffers go to the first
    rank. Parameters are cut only for optimizers that are known to be elementwise, or with the user's word for it.
    """
    load = [0] * world_size
    plans: dict[str, Plan] = {}
    for name, one in state.optimizers.items():
        specs = optimizer_params(name, one, state)
        reach = Reach.ELEMENT if elementwise else reach_called(one.kind)
        partition = _partition(partitioner, specs, world_size, load, whole=reach is not Reach.ELEMENT, what=one.kind)
        plans[name] = Plan.build(specs, partition, partitioner=partitioner.name)
    owned = {spec.name: (spec.shape, plan.partition) for plan in plans.values() for spec in plan.params}
    models: dict[str, dict[str, tuple[Shard, ...]]] = {}
    for name, tensors in state.models.items():
        buffers = state.buffers.get(name, frozenset())
        found: dict[str, tuple[Shard, ...]] = {}
        left: list[ParamSpec] = []
        for key, lazy in first_names(tensors)[0].items():
            owners = owned.get(key)
            if owners is not None and owners[0] == lazy.shape:
                found[key] = owners[1].by_param[key]
            elif key in buffers:
                found[key] = (Shard(key, 0, lazy.numel, 0),)
            else:
                left.append(ParamSpec(name=key, shape=lazy.shape, dtype=lazy.dtype))
        if left:
            found.update(_partition(partitioner, left, world_size, load, whole=False, what=name).by_param)
        models[name] = found
    return SpreadState(models=models, plans=plans)


def first_names(tensors: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Each tensor once, under its first name, and which name each further name stands for.

    Example:
        >>> import torch
        >>> from shardrt.checkpoint.spreading import first_names
        >>> from shardrt.state.portable import LazyTensor
        >>> tied = LazyTensor.of(torch.ones(2))
        >>> first_names({"a": tied, "b": tied})[1]
        {'b': 'a'}
    """
    names: dict[int, str] = {}
    found: dict[str, LazyTensor] = {}
    aliases: dict[str, str] = {}
    for name, lazy in tensors.items():
        first = names.setdefault(id(lazy), name)
        if first == name:
            found[name] = lazy
        else:
            aliases[name] = first
    return found, aliases


def optimizer_params(name: str, one: PortableOptimizer, state: PortableState) -> list[ParamSpec]:
    """The parameters of an optimizer: what it says of them, else the model's tensors, else the shape of their state."""
    tensors: dict[str, LazyTensor] = {}
    for model in reversed(list(state.models.values())):  # of several with one name, the first model's
        tensors.update(model)
    group = {param: number for number, options in enumerate(one.groups) for param in options["params"]}
    specs = []
    for param in dict.fromkeys((*one.params, *group, *one.state)):
        if (known := one.params.get(param)) is not None:
            specs.append(known)
            continue
        lazy: LazyTensor | None = tensors[param] if param in tensors else _like_the_parameter(one, param)
        if lazy is None:
            raise StateError(
                f"parameter {param!r} of optimizer {name!r} has no known shape: it is in no model, and its state does "
                "not tell; store it together with its model"
            )
        specs.append(ParamSpec(name=param, shape=lazy.shape, dtype=lazy.dtype, group=group.get(param, 0)))
    return specs


def _like_the_parameter(one: PortableOptimizer, param: str) -> LazyTensor | None:
    values = [value for value in one.state.get(param, {}).values() if isinstance(value, LazyTensor) and value.numel > 1]
    return values[0] if len({value.shape for value in values}) == 1 else None


def _partition(
    partitioner: Partitioner, specs: Sequence[ParamSpec], world_size: int, load: list[int], *, whole: bool, what: str
) -> Partition:
    """A checked partition; ``load`` is what each rank has so far, and grows by it."""
    request = PartitionRequest(params=tuple(specs), world_size=world_size, whole_parameters=whole, load=tuple(load))
    try:
        partition = partitioner.partition(request)
    except UnsupportedError as error:
        if not whole:
            raise
        raise UnsupportedError(
            f"parameters of {what or 'an optimizer of unknown class'} are kept whole, since its update is not known to "
            f"be elementwise: {error}; choose another partitioner, or say elementwise if its update of an element "
            "looks at that element alone"
        ) from error
    partition.check(specs)
    if partition.world_size != world_size:
        raise PlanError(
            f"partitioner {partitioner.name!r} gave a partition for {partition.world_size} ranks when asked for "
            f"{world_size}"
        )
    if whole and any(len(shards) > 1 for shards in partition.by_param.values()):
        raise PlanError(
            f"partitioner {partitioner.name!r} cut parameters of {what}, which needs them whole; choose another one"
        )
    sizes = {spec.name: spec.itemsize for spec in specs}
    for shard in partition.shards:
        load[shard.rank] += shard.numel * sizes[shard.param]
    return partition

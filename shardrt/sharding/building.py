"""How a module comes to be sharded: choose units, build the optimizer on them, let parameters come and go."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from shardrt.choosing import choose_partitioner
from shardrt.errors import ConfigError
from shardrt.handshake import Field
from shardrt.optim.build import Materialise, build_optimizer
from shardrt.optim.initial import sync_buffers
from shardrt.optim.managed import ManagedOptimizer
from shardrt.optim.mesh import Mesh, groups_of
from shardrt.optim.reach import Reach, reach_of
from shardrt.optim.residence import RESIDENT, Precision, PrecisionOf, own_precision
from shardrt.optim.sharded import ShardedOptimizer
from shardrt.plan import Plan, Shard
from shardrt.protocols import Communicator, Partitioner
from shardrt.sharding.arguments import check_defaults, grouped, ignored_things
from shardrt.sharding.deferred import check_initialisable, is_deferred, materialise
from shardrt.sharding.dividing import divide
from shardrt.sharding.guarding import guard
from shardrt.sharding.noticing import notice_backward
from shardrt.sharding.precision import cast_buffers, cast_inputs_of, mixed_precision_from, precision_by_name
from shardrt.sharding.prefetching import prefetch_from
from shardrt.sharding.running import UnitRunner
from shardrt.sharding.shown import ShownShards
from shardrt.sharding.strategies import Strategy, offloads, pins, strategy_called
from shardrt.sharding.units import Unit, find_units

if TYPE_CHECKING:
    from shardrt.runtime import Runtime


_BUCKET_BYTES = 8 * 2**20
"""What travels together, unless the runtime says otherwise."""


def shard_module(
    runtime: Runtime,
    module: torch.nn.Module,
    optimizer_class: type[torch.optim.Optimizer],
    *,
    strategy: Any,
    units: Any,
    partitioner: Any,
    prefetch: Any,
    mixed_precision: Any,
    param_init_fn: Any,
    offload: Any,
    shard_size: int | None,
    mesh: Any,
    reshard_after_forward: bool | int | None,
    sync_module_states: bool,
    ignored_modules: Iterable[torch.nn.Module],
    ignored_parameters: Iterable[torch.nn.Parameter],
    param_groups: Any = None,
    runners: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[UnitRunner]],
    elementwise: bool | None,
    uses: Sequence[str],
    defaults: Mapping[str, Any],
    arguments: Collection[str] = (),
    shows_shards: bool = False,
    divide_units: bool = False,
) -> ManagedOptimizer:
    """See :meth:`shardrt.Runtime.shard`, whose ``arguments`` are for messages; with ``shows_shards`` for any optimizer
    to step, see Note [Two faces]."""
    with runtime.agreeing("shard") as fields:
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"rt.shard takes a torch.nn.Module, got a {type(module).__name__}")
        if module in runners:
            raise ConfigError("this module is sharded already; shard a module once, with all its parameters")
        for flag, given in {"divide_units": divide_units, "sync_module_states": sync_module_states}.items():
            if not isinstance(given, bool):
                raise ConfigError(f"{flag}={given!r} is not possible; give True or False")
        chosen = strategy_called(strategy)
        fields["strategy"] = Field(value=chosen.name, fix="pass the same strategy on every rank")
        ahead = prefetch_from(prefetch)
        fields["prefetch"] = Field(value=repr(ahead), fix="pass the same prefetch on every rank")
        mixed = mixed_precision_from(mixed_precision)
        check_defaults(optimizer_class, defaults, arguments)
        residence = chosen.residence if runtime.world_size > 1 else RESIDENT
        residence = attrs.evolve(
            residence,
            offload=offloads(offload),
            pins=pins(offload),
            gradients=residence.gradients and not shows_shards,
        )
        ignored_modules, ignored_parameters = ignored_things(ignored_modules, ignored_parameters)
        found = find_units(module, units, ignored_modules=ignored_modules, ignored_parameters=ignored_parameters)
        fields["units"] = Field(value=[unit.name for unit in found], fix="choose the same units on every rank")
        fields["divide_units"] = Field(value=divide_units, fix="pass the same divide_units on every rank")
        names = {name for unit in found for name in unit.params}
        named = [(name, param) for name, param in module.named_parameters() if name in names]
        groups_given = named if param_groups is None else grouped(module, named, param_groups)
        deferred = is_deferred(module)
        if deferred:
            check_initialisable(found, param_init_fn)
        precision = own_precision if mixed is None else precision_by_name(module, mixed)
    whole = residence.params
    dividing = _partitioner(runtime, partitioner, optimizer_class, elementwise, whole=whole)
    groups = _mesh(runtime, chosen, shard_size, mesh) if runtime.world_size > 1 else None
    keeps, nearby = _nearby(runtime, module, groups, reshard_after_forward, whole=whole)
    if sync_module_states and not deferred and runtime.world_size > 1:
        sync_buffers(runtime, [(name, buffer) for name, buffer in module.named_buffers() if not buffer.is_meta])
    running = found
    most = _bucket_bytes(runtime, dividing)
    if divide_units and not whole and not keeps and most is not None:
        running = divide(module, found, most)
    optimizer = build_optimizer(
        runtime,
        groups_given,
        optimizer_class,
        gradients="average",
        elementwise=elementwise,
        initial="broadcast" if sync_module_states else "check",
        uses=uses,
        defaults=defaults,
        partitioner=dividing,
        bucket_bytes=runtime.bucket_bytes or _BUCKET_BYTES,
        units=None
        if whole and mixed is None and not residence.offload
        else _travelling(running, precision, dict(named), most),
        residence=residence,
        precision=precision,
        mesh=groups,
        materialise=_materialising(runtime, module, found, param_init_fn, keeps_whole=whole, mesh=groups)
        if deferred
        else None,
    )
    if mixed is not None:
        cast_buffers(module, mixed, {inner for given in ignored_modules for inner in given.modules()})
        cast_inputs_of(found, mixed)
    if isinstance(optimizer, ShardedOptimizer) and (shows_shards or not whole):
        runner = UnitRunner(
            running,
            optimizer,
            ahead,
            keeps_after_forward=keeps,
            keeps_last=reshard_after_forward is None,
            nearby=nearby,
            shown=ShownShards(module, optimizer) if shows_shards else None,
        )
        runners[module] = weakref.ref(runner)
    elif isinstance(optimizer, ShardedOptimizer) and optimizer.watch is not None:
        notice_backward(module, optimizer)
    if isinstance(optimizer, ShardedOptimizer):
        keeps_gradients = not residence.gradients and not shows_shards
        guard(module, () if whole else running, optimizer if keeps_gradients else None)
    return optimizer


def _nearby(
    runtime: Runtime, module: torch.nn.Module, mesh: Mesh | None, reshard: bool | int | None, *, whole: bool
) -> tuple[bool, Communicator | None]:
    """Whether units stay between forward and backward, or the few ranks among which they do: Note [Kept nearby]."""
    groups = (tuple(range(runtime.world_size)),) if mesh is None else mesh.groups
    share = 1 if whole else len(groups[0])
    with runtime.agreeing("reshard_after_forward") as fields:
        fields["reshard_after_forward"] = Field(value=reshard, fix="pass the same on every rank")
        is_flag = reshard is None or isinstance(reshard, bool)
        if not is_flag and (not isinstance(reshard, int) or reshard < 1 or share % reshard):
            raise ConfigError(
                f"reshard_after_forward={reshard!r} is not possible where {share} ranks share each parameter; give "
                "True, False, None, or a number of ranks that divides them"
            )
    if reshard is None:
        return False, None
    if isinstance(reshard, bool) or reshard in (1, share):
        return reshard is False or (reshard is not True and reshard == 1), None
    few = [group[start : start + reshard] for group in groups for start in range(0, len(group), reshard)]
    dtypes = {str(param.dtype).removeprefix("torch.") for param in module.parameters()}
    return False, runtime.open_among(few, dtypes)


def _mesh(runtime: Runtime, strategy: Strategy, shard_size: int | None, mesh: Any) -> Mesh | None:
    """Which ranks divide state among themselves; None where all do."""
    with runtime.agreeing("groups of ranks") as fields:
        given = None if mesh is None else groups_of(mesh, runtime.world_size)
        fields["mesh"] = Field(value=given, fix="pass the same mesh on every rank")
        fields["shard_size"] = Field(value=shard_size, fix="pass the same shard_size on every rank")
        if given is not None and (strategy.shares != "host" or shard_size is not None):
            raise ConfigError("mesh= says which ranks share under a hybrid strategy; use it there, without shard_size=")
        if strategy.shares == "none":
            if shard_size not in (None, 1):
                raise ConfigError(f"shard_size={shard_size!r} with strategy={strategy.name!r}, which shards nothing")
            shard_size = 1
        elif strategy.shares == "all" and shard_size not in (None, runtime.world_size):
            raise ConfigError(
                f"shard_size={shard_size!r} with strategy={strategy.name!r}, which shards over all ranks; use "
                "'hybrid_shard' or 'hybrid_shard_zero2'"
            )
    if strategy.shares == "all":
        return None
    if given is not None:
        return Mesh(groups=given, rank=runtime.rank)
    hosts = runtime.told("hosts of ranks", os.environ.get("SHARDRT_HOST") or socket.gethostname())
    with runtime.agreeing("groups of ranks, made"):
        if shard_size is not None:
            return Mesh.of(runtime.world_size, shard_size=shard_size, rank=runtime.rank)
        return Mesh.by_host(hosts, rank=runtime.rank)


def _materialising(
    runtime: Runtime,
    module: torch.nn.Module,
    units: Sequence[Unit],
    init: Any,
    *,
    keeps_whole: bool,
    mesh: Mesh | None,
) -> Materialise:
    device = torch.device(runtime.device_type)
    place = runtime.rank if mesh is None else mesh.shard_group.index(runtime.rank)

    def run(plan: Plan, communicator: Communicator) -> Mapping[Shard, torch.Tensor]:
        return materialise(
            module, units, plan, communicator, device=device, place=place, init=init, keeps_whole=keeps_whole
        )

    return run


def _bucket_bytes(runtime: Runtime, partitioner: Partitioner) -> int | None:
    """How large a bucket of a unit may be. Where parameters stay whole, few of them could not be divided evenly."""
    return (runtime.bucket_bytes or _BUCKET_BYTES) if getattr(partitioner, "cuts_parameters", False) else None


def _travelling(
    units: Sequence[Unit], precision: PrecisionOf, params: Mapping[str, torch.Tensor], most: int | None
) -> tuple[tuple[str, ...], ...]:
    """What shares buckets: neighbours of one unit and one precision, of so many bytes.

    A large unit has several, each divided among all ranks: its gradients are on their way before all are there.
    """
    found: list[tuple[str, ...]] = []
    for unit in units:
        open_groups: dict[Precision, tuple[list[str], int]] = {}
        groups: list[list[str]] = []
        for name in unit.params:
            names, size = open_groups.get(precision(name), ([], 0))
            if not names or (most is not None and size + params[name].nbytes > most):
                names, size = [], 0
                groups.append(names)
            names.append(name)
            open_groups[precision(name)] = (names, size + params[name].nbytes)
        found += map(tuple, groups)
    return tuple(found)


def _partitioner(
    runtime: Runtime,
    given: Any,
    optimizer_class: type[torch.optim.Optimizer],
    elementwise: bool | None,
    *,
    whole: bool,
) -> Partitioner:
    """The one that is asked for. Else, if the optimizer allows to cut parameters: even ranges of each unit where
    parameters are sharded too, of each bucket where they are not."""
    if given is not None:
        return choose_partitioner(runtime.registry, given)
    cuts = isinstance(optimizer_class, type) and reach_of(optimizer_class, elementwise) is Reach.ELEMENT
    if whole:
        # Whole parameters leave a bucket to few ranks, and the others' wires idle.
        wanted = "bucket" if cuts and runtime.partitioner.name == "greedy" else runtime.partitioner
        return choose_partitioner(runtime.registry, wanted)
    return choose_partitioner(runtime.registry, "flat" if cuts else "greedy")

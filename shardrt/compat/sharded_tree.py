"""A module and all in it, sharded for whatever optimizer of torch's steps it: what both FSDP interfaces stand on.

Note [Sharded at first use]: torch's scripts wrap inner modules first and the whole last. Which module is the whole is
known only when the first thing is asked of it (its parameters, a forward, a state dict), so that is when it is sharded:
modules that were wrapped inside it become its units.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist

from shardrt.compat.groups import find_place, timeout_of
from shardrt.compat.torch_optimizers import OptimizerOnShards, watch_optimizers
from shardrt.errors import ConfigError, ShardrtError
from shardrt.optim.managed import ManagedOptimizer
from shardrt.optim.residence import RESIDENT, Residence
from shardrt.runtime import Runtime
from shardrt.sharding.building import shard_module
from shardrt.sharding.prefetching import Prefetch
from shardrt.sharding.running import UnitRunner
from shardrt.sharding.shown import ShownShards
from shardrt.sharding.strategies import Strategy

_BOTH = Residence(params=False, gradients=False)
_GRADIENTS = Residence(gradients=False)
STRATEGIES = {
    "FULL_SHARD": (Strategy(name="full_shard", summary="", residence=_BOTH), True),
    "SHARD_GRAD_OP": (Strategy(name="shard_grad_op", summary="", residence=_BOTH), False),
    "NO_SHARD": (Strategy(name="no_shard", summary="", residence=_GRADIENTS, shares="none"), True),
    "HYBRID_SHARD": (Strategy(name="hybrid_shard", summary="", residence=_BOTH, shares="host"), True),
    "_HYBRID_SHARD_ZERO2": (Strategy(name="hybrid_shard_zero2", summary="", residence=_BOTH, shares="host"), False),
}
"""torch's members, as torch means them: what it is for us, and whether parameters go after forward."""


@attrs.frozen(kw_only=True)
class TreeSettings:
    """How a tree is to be sharded."""

    strategy: str = "FULL_SHARD"
    process_group: Any = None
    mesh: Any = None
    """Which ranks share under a hybrid strategy."""
    units: Any = ()
    mixed_precision: Any = None
    offload: Any = None
    prefetch: Prefetch = attrs.field(factory=Prefetch)
    param_init_fn: Any = None
    sync_module_states: bool = True
    ignored_modules: tuple[torch.nn.Module, ...] = ()
    ignored_parameters: tuple[torch.nn.Parameter, ...] = ()
    reshard_after_forward: bool | int | None = None
    """None: as the strategy says."""
    keeps_after_forward: tuple[torch.nn.Module, ...] = ()
    """Units that stay until their backward, whatever the others do."""
    device: str | None = None


class _SteppedByOthers(torch.optim.Optimizer):
    """Keeps shards for an optimizer that knows nothing of sharding."""

    shardrt_elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Nothing: somebody else steps."""


class ShardedTree:
    """A module that is sharded, with the runtime that it is sharded on."""

    def __init__(self, module: torch.nn.Module, settings: TreeSettings) -> None:
        self.module = module
        place = find_place(settings.process_group)
        limit = timeout_of(place.group, torch.device(settings.device or "cpu"))
        limits: dict[str, Any] = {} if limit is None else {"timeout": limit}
        self.runtime = Runtime(process_group=settings.process_group, device=settings.device, **limits)
        strategy, reshards = STRATEGIES[settings.strategy]
        reshard = reshards if settings.reshard_after_forward is None else settings.reshard_after_forward
        try:
            self.holder = shard_module(
                self.runtime,
                module,
                _SteppedByOthers,
                strategy=strategy if self.runtime.world_size > 1 else attrs.evolve(strategy, residence=RESIDENT),
                units=settings.units,
                partitioner="flat",
                prefetch=settings.prefetch,
                mixed_precision=settings.mixed_precision,
                param_init_fn=settings.param_init_fn,
                offload=settings.offload,
                shard_size=None,
                mesh=settings.mesh,
                reshard_after_forward=reshard if strategy.residence is _BOTH and self.runtime.world_size > 1 else True,
                sync_module_states=settings.sync_module_states,
                ignored_modules=settings.ignored_modules,
                ignored_parameters=settings.ignored_parameters,
                runners=self.runtime._runners,
                elementwise=True,
                uses=(),
                defaults={},
                shows_shards=True,
            )
        except BaseException:
            self.runtime.close()
            raise
        self.runtime._optimizers.append(weakref.ref(self.holder))
        found = self.runtime._runners.get(module)
        self.runner: UnitRunner | None = None if found is None else found()
        if self.runner is not None:
            for inner in settings.keeps_after_forward:
                self.runner.keep_after_forward(inner, True)
        self._show_shards()
        watch_optimizers(self)
        # Not when the interpreter ends: threads then leave by themselves, without waiting for anybody.
        weakref.finalize(self, _close, self.runtime).atexit = False

    @property
    def shown(self) -> ShownShards | None:
        """The parts that are shown as parameters; None where this rank is alone and has everything."""
        return None if self.runner is None else self.runner.shown

    def _show_shards(self) -> None:
        if self.shown is not None:
            self.shown.show_shards()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A block in which the module's attributes are its whole parameters, though their values may be away."""
        with ExitStack() as stack:
            if self.shown is not None:
                stack.enter_context(self.shown.whole())
            yield

    @contextmanager
    def summoned(
        self,
        module: torch.nn.Module,
        *,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """A block in which a module of the tree has its whole parameters, with their values: all that are in it, or
        only those of its own unit."""
        with ExitStack() as stack:
            stack.enter_context(self.whole())
            wanted = set(module.parameters())
            if not recurse and self.runner is not None:
                named = self.holder.named()
                wanted &= {named[name] for name in self.runner.names_of(module)}
            stack.enter_context(
                self.runtime._summoned(
                    wanted, writeback=writeback, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu
                )
            )
            if with_grads and self.shown is not None:
                stack.enter_context(self.shown.whole_gradients(wanted, writeback=writeback))
            yield

    def start_over(self) -> None:
        """An exception has ended a forward or backward on every rank: drop its gradients, and be as before it."""
        self.holder.zero_grad()
        if self.shown is not None:
            self.shown.drop_gradients()
        if self.runner is not None:
            self.runner.start_over()

    def no_sync(self) -> Any:
        """A block in which backward only accumulates."""
        return self.runtime.no_sync(self.holder)

    def adopted(self, optimizer: torch.optim.Optimizer) -> ManagedOptimizer:
        """An optimizer of torch's over this tree's parts, as state dicts see it."""
        return OptimizerOnShards(optimizer, self)

    def names(self) -> Mapping[torch.Tensor, str]:
        """Of the parameters as they are shown."""
        shown = self.shown
        found = self.holder.named() if shown is None else shown.shards
        return {part: name for name, part in found.items()}


def inner_units(units: Any, wrapped: Iterable[torch.nn.Module]) -> Any:
    """What a policy chooses, and modules that were wrapped by hand."""
    by_hand = list(wrapped)
    if not by_hand:
        return units
    if units is None or units == ():
        return by_hand
    raise ConfigError(
        "an auto_wrap_policy around modules that were wrapped by hand; do either: wrap all by hand, or none"
    )


def hybrid_groups(process_group: Any, device_mesh: Any) -> tuple[Any, Any]:
    """The group of all ranks and who shares with whom, from torch's ways to say it."""
    if device_mesh is not None:
        if process_group is not None:
            raise ConfigError("pass process_group or device_mesh, not both")
        if device_mesh.ndim == 1:
            return device_mesh.get_group(), None
        if device_mesh.ndim != 2:
            raise ConfigError(f"device_mesh has {device_mesh.ndim} axes; give one (shards) or two (replicas, shards)")
        return None, device_mesh
    if isinstance(process_group, (tuple, list)):
        if len(process_group) != 2:
            raise ConfigError("process_group of several must be two: (ranks that share, ranks that replicate)")
        shares = dist.get_process_group_ranks(process_group[0])
        told: list[Any] = [None] * dist.get_world_size()
        mine = torch.tensor(shares, dtype=torch.int64)
        rows = torch.zeros(dist.get_world_size(), len(shares), dtype=torch.int64)
        rows[dist.get_rank()] = mine
        dist.all_reduce(rows)
        told = sorted({tuple(row) for row in rows.tolist()})
        return None, told
    return process_group, None


def _close(runtime: Runtime) -> None:
    try:
        runtime.close()
    except ShardrtError:
        return

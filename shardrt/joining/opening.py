"""From what a user hands to ``rt.join`` to a block that all ranks enter alike."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from shardrt.choosing import choose_join_policy, described
from shardrt.errors import ConfigError, UnsupportedError
from shardrt.handshake import Field
from shardrt.joining.block import JoinBlock
from shardrt.joining.carrying import Carried
from shardrt.joining.ddp import DdpFollower
from shardrt.optim.managed import ManagedOptimizer
from shardrt.optim.sharded import ShardedOptimizer

if TYPE_CHECKING:
    from shardrt.loop import LoopCalls


def open_block(
    runtime: LoopCalls, targets: Sequence[object], *, policy: Any, carry: Sequence[object]
) -> AbstractContextManager[None]:
    """See :meth:`shardrt.Runtime.join`."""
    with runtime.agreeing("join") as fields:
        chosen = choose_join_policy(runtime.registry, policy)
        optimizers = _optimizers(runtime, targets)
        communicator = runtime.negotiate(())
        carried = Carried(carry, communicator)
        carried.check()
        same = "call rt.join with the same arguments on every rank"
        fields["policy"] = Field(value=described(policy), fix=same)
        numbers = [runtime.living_optimizers().index(optimizer) for optimizer in optimizers]
        fields["optimizers"] = Field(value=numbers, fix=same)
        fields["carry"] = Field(value=carried.kinds(), fix=same)
        sharded = [_checked(optimizer) for optimizer in optimizers if isinstance(optimizer, ShardedOptimizer)]
        _check_order(runtime, sharded)
        followers = [
            DdpFollower(module, runtime, world_size=runtime.world_size) for module in _modules(targets, sharded)
        ]
    if runtime.world_size == 1:
        return nullcontext()
    return JoinBlock(runtime, sharded, followers, chosen, carried, runtime.roll_call_communicator())


def _optimizers(runtime: LoopCalls, targets: Sequence[object]) -> list[ManagedOptimizer]:
    if not targets:
        raise ConfigError(
            "rt.join takes the optimizers that the loop steps, or modules that they train, and got nothing; "
            "rt.join(opt)"
        )
    found: list[ManagedOptimizer] = []
    for target in targets:
        if isinstance(target, torch.optim.Optimizer) and not isinstance(target, ManagedOptimizer):
            raise ConfigError(
                f"rt.join takes optimizers made by rt.optimizer, got a {type(target).__name__}; a "
                "shardrt.compat.ZeroRedundancyOptimizer goes into torch's Join, with its DistributedDataParallel"
            )
        found += [one for one in runtime.optimizers_of(target) if one not in found]  # type: ignore[arg-type]
    living = runtime.living_optimizers()
    return sorted(found, key=living.index)


def _checked(optimizer: ShardedOptimizer) -> ShardedOptimizer:
    if optimizer.announcer is not None:
        raise ConfigError("an optimizer is in a block of rt.join already; blocks do not go into one another")
    if optimizer.gradients == "reduced" or optimizer.has_hook:
        raise UnsupportedError(
            "rt.join cannot serve an optimizer whose gradients somebody else reduces (gradients='reduced', or a "
            "communication hook of yours): a rank without inputs gets none; build it with gradients='average' and "
            "rt.attach(ddp, opt) without a hook, or use shardrt.compat.ZeroRedundancyOptimizer in torch's Join"
        )
    return optimizer


def _check_order(runtime: LoopCalls, optimizers: Sequence[ShardedOptimizer]) -> None:
    if len(optimizers) > 1 and any(optimizer.watch is not None for optimizer in optimizers):
        raise UnsupportedError(
            f"rt.join got {len(optimizers)} optimizers under schedule {runtime.schedule.name!r}, which works during "
            "backward, where the gradients of several come in no fixed order; use schedule='sync', or one optimizer "
            "with several parameter groups"
        )


def _modules(targets: Sequence[object], optimizers: Sequence[ShardedOptimizer]) -> list[DistributedDataParallel]:
    attached: list[DistributedDataParallel] = []
    for optimizer in optimizers:
        module = None if optimizer.attached_to is None else optimizer.attached_to()
        if module is not None and not any(module is one for one in attached):
            attached.append(module)
    for target in targets:
        if optimizers and isinstance(target, DistributedDataParallel) and not any(target is one for one in attached):
            raise UnsupportedError(
                "the DistributedDataParallel module reduces its gradients itself, which a rank without inputs cannot "
                "follow; attach it before: rt.attach(ddp, opt)"
            )
    return attached

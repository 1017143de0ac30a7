"""Optimizers of torch's that step this rank's parts: what their state means, and which of them may.

Note [Who may step parts]: an optimizer whose update looks at more than one element would be silently wrong on parts.
And one that was made before the module was sharded has parameters that never get a gradient: it would silently do
nothing. Every optimizer of torch's tells of its steps (a hook of torch's), and is looked at in the first.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardrt.errors import OptimizerError, UnsupportedError
from shardrt.optim.managed import ManagedOptimizer
from shardrt.optim.reach import Reach, reach_of
from shardrt.plan import Shard
from shardrt.sharding.shard_tensors import ShardParameter

if TYPE_CHECKING:
    from shardrt.compat.sharded_tree import ShardedTree

_TREES: weakref.WeakSet[ShardedTree] = weakref.WeakSet()
_SEEN: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def watch_optimizers(tree: ShardedTree) -> None:
    """From now on optimizers that cannot be right on this tree are refused at their first step."""
    if not _TREES:
        register_optimizer_step_pre_hook(_look_at)
    _TREES.add(tree)


def _look_at(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if isinstance(optimizer, ManagedOptimizer) or _SEEN.get(optimizer) == count:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    away = {whole for tree in _TREES if tree.shown is not None for whole in tree.holder.named().values()}
    if any(param in away for param in params):
        raise OptimizerError(
            f"this {type(optimizer).__name__} was made before its module was sharded, and has parameters that get no "
            "gradients any more; make it from model.parameters() afterwards"
        )
    whole = reach_of(type(optimizer)) is not Reach.ELEMENT
    if whole and any(isinstance(param, ShardParameter) for param in params):
        raise UnsupportedError(
            f"{type(optimizer).__name__} is not known to be elementwise, and parameters are cut into parts here; use "
            "rt.shard(model, optimizer_class, ...), which gives it whole parameters, or mark the class with "
            "shardrt_elementwise = True if its update of an element looks at that element alone"
        )
    if optimizer not in _SEEN and any(isinstance(param, ShardParameter) for param in params):
        optimizer.register_state_dict_pre_hook(_refuse_torchs_functions)
    _SEEN[optimizer] = count


def _refuse_torchs_functions(optimizer: torch.optim.Optimizer) -> None:
    """torch's ``get_optimizer_state_dict`` takes tensors that are no DTensors for whole ones: whoever saved its result
    would have one rank's parts, and no trace of the others'."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise UnsupportedError(
                f"torch.distributed.checkpoint.state_dict would take this rank's parts of {type(optimizer).__name__}'s "
                "state for all of it; import the function of the same name from shardrt.compat"
            )


class OptimizerOnShards(ManagedOptimizer):
    """An optimizer of torch's over the parts of a tree, as state dicts see it."""

    def __init__(self, optimizer: torch.optim.Optimizer, tree: ShardedTree) -> None:
        # Not the base class's: this only stands for an optimizer that is set up already.
        names = tree.names()
        wholes = tree.holder.named()
        self._optimizer = optimizer
        self.plan, self.mesh = tree.holder.plan, tree.holder.mesh
        self._steps = self._steps_before = 0
        strangers = sum(param not in names for group in optimizer.param_groups for param in group["params"])
        if strangers:
            raise OptimizerError(
                f"this {type(optimizer).__name__} has {strangers} parameters that are not of this module; make it from "
                "model.parameters(), after the module was sharded"
            )
        self.defaults = optimizer.defaults
        self.param_groups = [
            {**group, "params": [wholes[names[param]] for param in group["params"]]} for group in optimizer.param_groups
        ]
        self._named = {
            names[param]: wholes[names[param]] for group in optimizer.param_groups for param in group["params"]
        }
        rank = tree.holder.mesh.shard_group.index(tree.runtime.rank) if tree.holder.mesh else tree.runtime.rank
        parts = {name: part for part, name in names.items()}
        self._owned = [
            (shard, parts[name])
            for name in self._named
            for shard in self.plan.partition.by_param[name]
            if shard.rank == rank
        ]

    def named(self) -> dict[str, torch.Tensor]:
        """The whole parameters by their names, in the order of the groups."""
        return self._named

    def owned(self) -> list[tuple[Shard, torch.Tensor]]:
        """This rank's shards with the parts that are stepped."""
        return self._owned

    def _local_optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    @property
    def is_elementwise(self) -> bool:
        """Whether the update of an element looks at that element alone."""
        return reach_of(type(self._optimizer)) is Reach.ELEMENT

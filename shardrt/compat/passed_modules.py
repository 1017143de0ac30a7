"""Modules that were passed to ``fully_shard``, and what they are together. See Note [Sharded at first use]."""

from __future__ import annotations

import attrs
import torch

from shardrt.compat.sharded_tree import ShardedTree, TreeSettings
from shardrt.errors import ConfigError
from shardrt.sharding.precision import casting_output

PASSED = "_shardrt_fully_sharded"
"""Where a module keeps what it was passed with."""


@attrs.define(eq=False)
class Passed:
    """A module that was passed to ``fully_shard``."""

    module: torch.nn.Module
    settings: TreeSettings
    outer: Passed | None = None
    tree: ShardedTree | None = None
    is_being_sharded: bool = False
    output_dtype: torch.dtype | None = None
    """What its outputs are cast to: the one thing in which modules of a model may differ in precision."""
    reduces: bool = True
    """Whether its gradients are to be reduced in the next backward."""

    def root(self) -> Passed:
        found = self
        while found.outer is not None:
            found = found.outer
        return found

    def sharded(self) -> ShardedTree:
        """The tree it is in, made when it is first asked for."""
        root = self.root()
        if root.tree is None:
            inner = [one for one in passed_in(root.module) if one is not root]
            root.is_being_sharded = True
            try:
                root.tree = ShardedTree(root.module, _together(root.settings, inner))
            finally:
                root.is_being_sharded = False
            _reshard_root(root, root.tree)
            for one in (root, *inner):
                if one.output_dtype is not None:
                    one.module.register_forward_hook(casting_output(one.output_dtype))
        return root.tree


def passed_in(module: torch.nn.Module) -> list[Passed]:
    return [vars(one)[PASSED] for one in module.modules() if PASSED in vars(one)]


def _together(settings: TreeSettings, inner: list[Passed]) -> TreeSettings:
    """The settings of the whole, from those of all modules that were passed."""
    for one in inner:
        for name in ("strategy", "process_group", "mixed_precision", "offload"):
            mine, other = getattr(settings, name), getattr(one.settings, name)
            if mine != other:
                raise ConfigError(
                    f"{type(one.module).__name__} was passed to fully_shard with {name}={other!r}, the whole with "
                    f"{mine!r}; modules of one model are sharded alike: pass the same to all"
                )
    wanted = {
        True if one.settings.reshard_after_forward is None else one.settings.reshard_after_forward for one in inner
    }
    of_root = settings.reshard_after_forward
    if of_root is not None and not isinstance(of_root, bool):
        wanted.add(of_root)
    numbers = {one for one in wanted if not isinstance(one, bool)}
    if len(numbers) > 1 or (numbers and len(wanted) > 1):
        raise ConfigError(
            f"reshard_after_forward is {sorted(wanted, key=str)} for different modules; numbers must agree"
        )
    return attrs.evolve(
        settings,
        units=[one.module for one in inner],
        ignored_parameters=(
            *settings.ignored_parameters,
            *(p for one in inner for p in one.settings.ignored_parameters),
        ),
        reshard_after_forward=next(iter(numbers), True),
        keeps_after_forward=tuple(one.module for one in inner if one.settings.reshard_after_forward is False),
    )


def _reshard_root(root: Passed, tree: ShardedTree) -> None:
    """As in torch, the root's own parameters go after its forward only where that is said of the root itself."""
    if tree.runner is not None and root.settings.reshard_after_forward not in (None, False):
        tree.runner.keep_after_forward(root.module, False)

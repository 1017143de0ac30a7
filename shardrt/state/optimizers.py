"""One rank's part of an optimizer's state, apart from the optimizer: by parameter name, shard and key.

Note [Slices and trees]: a state value that has one element for each element of the parameter (a running mean) follows
the parameter wherever it is cut; it is *sliced*. Whatever else an optimizer keeps (a count of steps, a list of
matrices) belongs to the parameter as a whole, is the same for all its shards, and is stored once, as a *tree*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from shardrt.errors import StateError
from shardrt.optim.managed import ManagedOptimizer
from shardrt.plan import Shard
from shardrt.protocols import TensorSpec
from shardrt.state.tree import pack, unpack

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts that DistributedDataParallel, torch.compile, FSDP and checkpoint wrappers put into names; state is stored
without them."""


@attrs.frozen(kw_only=True)
class Tree:
    """A value of the parameter as a whole, with its tensors by name."""

    tree: Any
    tensors: Mapping[str, torch.Tensor]

    def value(self) -> Any:
        """The value, with copies of its tensors: two shards must not count their steps in one tensor."""
        return unpack(self.tree, lambda name: self.tensors[name].clone(), where="optimizer state")


@attrs.frozen(kw_only=True)
class ShardState:
    """What an optimizer keeps for one shard."""

    param: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    stop: int
    sliced: Mapping[str, torch.Tensor]
    """By key: one element for each of the shard's, in any shape."""
    trees: Mapping[str, Tree]


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers add to it.

    Example:
        >>> from shardrt.state.optimizers import plain_name
        >>> plain_name("module._orig_mod.layer.weight")
        'layer.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS) or name


def stored_names(optimizer: ManagedOptimizer, models: Iterable[torch.nn.Module] = ()) -> dict[str, str]:
    """What each parameter is called in stored state: as its model calls it, where that is known.

    An optimizer that was given parameters without names gets the model's names, and one that was given DDP's gets them
    without the wrapper's part.
    """
    by_tensor: dict[torch.Tensor, str] = {}
    for model in models:
        for name, param in model.named_parameters():
            by_tensor.setdefault(param, plain_name(name))
    found = {name: by_tensor.get(tensor, plain_name(name)) for name, tensor in optimizer.named().items()}
    if len(set(found.values())) < len(found):  # two models may use the same names: the optimizer's own are unique
        return {name: name for name in found}
    return found


def own_state(optimizer: ManagedOptimizer, names: Mapping[str, str]) -> list[ShardState]:
    """What this rank keeps and answers for, in the order of its shards; tensors are the optimizer's own, not copies."""
    if not optimizer.answers:
        return []
    shapes = {name: tuple(tensor.shape) for name, tensor in optimizer.named().items()}
    kept = optimizer.local_state()
    return [
        _shard_state(names[shard.param], shapes[shard.param], shard, stepped, kept.get(stepped, {}))
        for shard, stepped in optimizer.owned()
    ]


def _shard_state(
    name: str, shape: tuple[int, ...], shard: Shard, stepped: torch.Tensor, state: Mapping[str, Any]
) -> ShardState:
    sliced: dict[str, torch.Tensor] = {}
    trees: dict[str, Tree] = {}
    for key, value in state.items():
        if not isinstance(key, str):
            raise StateError(
                f"the optimizer keeps state of {name!r} under the key {key!r}; only text can be stored as a key"
            )
        if type(value) is torch.Tensor and value.shape == stepped.shape and value.layout is torch.strided:
            sliced[key] = value
        else:
            trees[key] = as_tree(value, key, where=f"optimizer state {key!r} of {name!r}")
    return ShardState(param=name, shape=shape, start=shard.start, stop=shard.stop, sliced=sliced, trees=trees)


def as_tree(value: Any, key: str, *, where: str) -> Tree:
    """A value and its tensors, called by the key and a number."""
    tensors: dict[str, torch.Tensor] = {}

    def put(tensor: torch.Tensor) -> str:
        name = key if not tensors else f"{key}.{len(tensors)}"
        tensors[name] = tensor
        return name

    return Tree(tree=pack(value, put, where=where), tensors=tensors)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """What describes a tensor without its values.

    Example:
        >>> import torch
        >>> from shardrt.state.optimizers import spec_of
        >>> spec_of(torch.ones(2, 3))
        TensorSpec(dtype='float32', shape=(2, 3))
    """
    return TensorSpec(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def class_name(optimizer: ManagedOptimizer) -> str:
    """The user's class, as it is stored and compared."""
    kind = type(optimizer._local_optimizer())
    return f"{kind.__module__}.{kind.__qualname__}"


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each group, tensors copied."""
    return [
        {
            key: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]


def group_names(optimizer: ManagedOptimizer, names: Mapping[str, str]) -> list[list[str]]:
    """The stored names of each group's parameters, in order."""
    by_tensor = {tensor: names[name] for name, tensor in optimizer.named().items()}
    return [[by_tensor[param] for param in group["params"]] for group in optimizer.param_groups]


def put_options(optimizer: ManagedOptimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Take over options, in place: schedulers and the user hold these very mappings."""
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        for key, value in options.items():
            held = group.get(key)
            if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor):
                group[key] = value.to(device=held.device, dtype=held.dtype).clone()
            else:
                group[key] = value.clone() if isinstance(value, torch.Tensor) else value

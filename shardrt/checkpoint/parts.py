"""What one rank writes: its tensors, and what it has to say of them."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import attrs
import numpy as np
import torch

from shardrt.errors import StateError
from shardrt.optim.managed import ManagedOptimizer
from shardrt.plan import Shard
from shardrt.protocols import StateFormat
from shardrt.state.models import ModelState, OwnParts, answering, model_state
from shardrt.state.optimizers import ShardState, class_name, group_names, group_options, own_state, stored_names
from shardrt.state.portable import LazyTensor
from shardrt.state.tree import pack

Stored = TypeVar("Stored", torch.Tensor, LazyTensor)


class TensorTable(Generic[Stored]):
    """The tensors of one file by unique names, in the order in which they are written.

    Example:
        >>> import torch
        >>> from shardrt.checkpoint.parts import TensorTable
        >>> table = TensorTable()
        >>> table.add("t", torch.ones(1)), table.add("t", torch.ones(1))
        ('t', 't#2')
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Stored] = {}

    def add(self, name: str, tensor: Stored) -> str:
        """Keep a tensor; returns the name it got."""
        unique, number = name, 1
        while unique in self.tensors:
            number += 1
            unique = f"{name}#{number}"
        self.tensors[unique] = tensor
        return unique

    def putting(self, name: str) -> Callable[[Stored], str]:
        """What :func:`shardrt.state.tree.pack` needs to keep the tensors of a tree here."""
        return lambda tensor: self.add(name, tensor)


def label_of(name: str, start: int, stop: int, numel: int) -> str:
    """What a part of a tensor is called in its file.

    Example:
        >>> from shardrt.checkpoint.parts import label_of
        >>> label_of("model/w", 0, 6, 6), label_of("model/w", 2, 6, 6)
        ('model/w', 'model/w[2:6]')
    """
    return name if stop - start == numel else f"{name}[{start}:{stop}]"


def file_name(rank: int, world_size: int, state_format: StateFormat) -> str:
    """What a rank's file is called."""
    return f"rank-{rank:05d}-of-{world_size:05d}{state_format.suffix}"


@attrs.define(kw_only=True, eq=False)
class RankPart:
    """Everything that one rank contributes to a checkpoint."""

    table: TensorTable[torch.Tensor]
    pieces: dict[str, Any]
    """Of models and optimizers: which of their elements are which tensors of this file, as JSON values."""
    random: Any
    common: dict[str, Any] | None
    """What is the same for all ranks, on the first one; None on the others."""
    step: int


def rank_part(
    models: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, ManagedOptimizer],
    extra: Any,
    *,
    rank: int,
    world_size: int,
) -> RankPart:
    """This rank's part of a checkpoint of these. Tensors are the live ones, not copies."""
    for optimizer in optimizers.values():
        optimizer.check_between_steps("saving")
        optimizer.finish()
    table: TensorTable[torch.Tensor] = TensorTable()
    states = {name: model_state(module) for name, module in models.items()}
    names = {name: stored_names(optimizer, models.values()) for name, optimizer in optimizers.items()}
    pieces = {
        "models": {
            name: _model_pieces(
                name,
                state,
                answering(state, optimizers.values(), world_size),
                OwnParts(state, optimizers.values()),
                table,
                rank,
            )
            for name, state in states.items()
        },
        "optimizers": {
            name: {"state": _optimizer_pieces(name, own_state(optimizer, names[name]), table)}
            for name, optimizer in optimizers.items()
        },
    }
    common = None
    if rank == 0:
        common = {
            "models": {name: _model_common(name, state, table) for name, state in states.items()},
            "optimizers": {
                name: _optimizer_common(name, optimizer, names[name], table) for name, optimizer in optimizers.items()
            },
            "extra": pack(extra, table.putting("extra"), where="extra"),
        }
    step = max((optimizer.steps_taken for optimizer in optimizers.values()), default=0)
    return RankPart(
        table=table,
        pieces=pieces,
        random=pack(random_states(), table.putting("random"), where="random states"),
        common=common,
        step=step,
    )


def _model_pieces(
    model: str,
    state: ModelState,
    shards: Mapping[str, Sequence[Shard]],
    own: OwnParts,
    table: TensorTable[torch.Tensor],
    rank: int,
) -> dict[str, list[list[Any]]]:
    found: dict[str, list[list[Any]]] = {}
    for name, owners in shards.items():
        for shard in owners:
            if shard.rank == rank:
                part = own.read(shard)
                whole = shard.numel == state.tensors[name].numel()
                label = label_of(f"{model}/{name}", shard.start, shard.stop, state.tensors[name].numel())
                stored = table.add(label, part.view(state.tensors[name].shape) if whole else part)
                found.setdefault(name, []).append([stored, shard.start, shard.stop])
    return found


def _model_common(model: str, state: ModelState, table: TensorTable[torch.Tensor]) -> dict[str, Any]:
    return {
        "tensors": {
            name: [str(state.dtype(name)).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in state.tensors.items()
        },
        "buffers": sorted(state.buffers),
        "aliases": dict(state.aliases),
        "values": pack(dict(state.values), table.putting(f"{model}/extra_state"), where=f"extra state of {model}"),
    }


def _optimizer_pieces(optimizer: str, state: Sequence[ShardState], table: TensorTable[torch.Tensor]) -> list[Any]:
    """A row per shard: parameter, range, tensors of its sliced values by key, trees by key."""
    rows = []
    for shard in state:
        numel = math.prod(shard.shape)
        whole = shard.stop - shard.start == numel
        sliced = {
            key: [
                table.add(
                    label_of(f"{optimizer}/{shard.param}/{key}", shard.start, shard.stop, numel),
                    tensor if whole else tensor.reshape(-1),
                ),
                str(tensor.dtype).removeprefix("torch."),
            ]
            for key, tensor in shard.sliced.items()
        }
        trees: dict[str, Any] = {}
        if shard.start == 0:  # they are the same for all shards of a parameter
            for key, tree in shard.trees.items():
                stored = {
                    name: table.add(f"{optimizer}/{shard.param}/{key}", tensor) for name, tensor in tree.tensors.items()
                }
                trees[key] = renamed(tree.tree, stored)
        rows.append([shard.param, shard.start, shard.stop, sliced, trees])
    return rows


def renamed(tree: Any, names: Mapping[str, str]) -> Any:
    """A tree whose tensors are called otherwise.

    Example:
        >>> from shardrt.checkpoint.parts import renamed
        >>> renamed([{"$": "tensor", "name": "a"}], {"a": "b"})
        [{'$': 'tensor', 'name': 'b'}]
    """
    if isinstance(tree, list):
        return [renamed(item, names) for item in tree]
    if isinstance(tree, dict):
        if tree.get("$") in ("tensor", "array"):
            return {**tree, "name": names[tree["name"]]}
        return {key: renamed(item, names) for key, item in tree.items()}
    return tree


def _optimizer_common(
    name: str, optimizer: ManagedOptimizer, names: Mapping[str, str], table: TensorTable[torch.Tensor]
) -> dict[str, Any]:
    options = [
        pack(group, table.putting(f"{name}/options"), where=f"options of parameter group {index}")
        for index, group in enumerate(group_options(optimizer))
    ]
    return {
        "class": class_name(optimizer),
        "step": optimizer.steps_taken,
        "groups": [list(group) for group in zip(options, group_names(optimizer, names), strict=True)],
        "params": {
            names[param]: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for param, tensor in optimizer.named().items()
        },
        "plan": optimizer.plan.to_json(),
    }


def random_states() -> dict[str, Any]:
    """The random generators of this process: torch's on each device in use, Python's, and numpy's global one."""
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "state": np.array(numbers, dtype=np.uint32), "gauss": gauss},
    }
    if torch.accelerator.is_available():
        module = torch.get_device_module()
        states["device"] = [state.cpu() for state in module.get_rng_state_all()]
    if "numpy.random" in sys.modules:
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        states["numpy"] = {
            "kind": str(kind),
            "keys": np.asarray(keys),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        }
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Let the generators of this process go on where those were."""
    try:
        python = states["python"]
        random.setstate((python["version"], tuple(int(number) for number in python["state"]), python["gauss"]))
        torch.set_rng_state(states["torch"])
        if "device" in states and torch.accelerator.is_available():
            torch.get_device_module().set_rng_state_all(states["device"])
        if "numpy" in states:
            kept = states["numpy"]
            legacy = (kept["kind"], kept["keys"], kept["position"], kept["has_gauss"], kept["cached"])
            np.random.set_state(legacy)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise StateError(f"the stored random states cannot be used here: {error}; pass random=False") from error


def check_random_states(states: Mapping[str, Any]) -> None:
    """Raise :class:`~shardrt.errors.StateError` unless the generators could go on from these; they stay as they are.

    Example:
        >>> from shardrt.checkpoint.parts import check_random_states, random_states
        >>> check_random_states(random_states())
    """
    now = random_states()
    try:
        set_random_states(states)
    finally:
        set_random_states(now)

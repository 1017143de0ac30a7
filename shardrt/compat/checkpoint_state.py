"""torch's functions of ``torch.distributed.checkpoint.state_dict``, for modules that are sharded here.

Note [Whole on every rank]: torch gives each rank DTensors, which know what they are parts of, unless whole tensors are
asked for. There are none here, and a part that does not say what it is a part of would be taken for the whole by
whoever saves it. So tensors are whole also without ``full_state_dict``: ``torch.distributed.checkpoint`` then writes
each of them once, and reads it back into the whole one.

Note [A form to load into]: torch's checkpoints are read into the tensors of a state dict that is there. That of an
optimizer that has not stepped has none, and nothing would be read. So such an optimizer takes a step that changes
nothing, and loses again what that has left behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn.modules.module import _IncompatibleKeys

from shardrt.compat import fsdp_state
from shardrt.compat.fsdp_module import FSDPModule
from shardrt.compat.fsdp_optimizers import OptimizerStates
from shardrt.compat.sharded_tree import ShardedTree
from shardrt.errors import ConfigError, StateError, UnsupportedError
from shardrt.state.fitting import incompatible_keys
from shardrt.state.kinds import StateKind
from shardrt.state.optimizers import plain_name

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def get_model_state_dict(
    model: torch.nn.Module,
    *,
    submodules: set[torch.nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """A model's state by the names of the unsharded one; every rank calls it. See Note [Whole on every rank].

    Example:
        >>> import torch
        >>> from shardrt.compat import fully_shard, get_model_state_dict
        >>> sorted(get_model_state_dict(fully_shard(torch.nn.Linear(2, 1))))
        ['bias', 'weight']
    """
    tree = _tree_in(model)
    if tree is None:
        return torchs.get_model_state_dict(model, submodules=submodules, options=options)
    wanted = _checked(options, submodules)
    rank0_only = wanted.full_state_dict and wanted.cpu_offload
    if not isinstance(model, (FSDPModule, OptimizerStates)):  # what is sharded is further inside
        state = dict(model.state_dict())
        state = {} if rank0_only and tree.runtime.rank else state
    else:
        kind = StateKind(rank0_only=rank0_only, offload_to_cpu=wanted.cpu_offload)
        with tree.whole():
            state = tree.runtime._made(_inside(model), kind)
    if wanted.ignore_frozen_params:
        frozen = set(_frozen_names(model))
        state = {name: value for name, value in state.items() if name not in frozen}
    return state


def get_optimizer_state_dict(
    model: torch.nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[torch.nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The state of one or several optimizers, by the names of the parameters; every rank calls it.

    Example:
        >>> import torch
        >>> from shardrt.compat import fully_shard, get_optimizer_state_dict
        >>> model = fully_shard(torch.nn.Linear(2, 1))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> get_optimizer_state_dict(model, optimizer)["state"]["weight"]["step"]
        tensor(1.)
    """
    tree = _tree_in(model)
    if tree is None:
        return torchs.get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options)
    wanted = _checked(options, submodules)
    rank0_only = wanted.full_state_dict and wanted.cpu_offload
    kind = StateKind(rank0_only=rank0_only, offload_to_cpu=wanted.cpu_offload)
    whole: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in _several(optimizers):
        with _has_state(optimizer):
            made = fsdp_state.optimizer_state(tree, optimizer, kind)
        if made:
            whole["state"].update(made["state"])
            whole["param_groups"] += made["param_groups"]
    if rank0_only and tree.runtime.rank:
        return {}
    return _flattened(whole) if wanted.flatten_optimizer_state_dict else whole


def get_state_dict(
    model: torch.nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[torch.nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both; every rank calls it.

    Example:
        >>> import torch
        >>> from shardrt.compat import fully_shard, get_state_dict
        >>> model = fully_shard(torch.nn.Linear(2, 1))
        >>> of_model, of_optimizer = get_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> of_optimizer["param_groups"][0]["params"]
        ['weight', 'bias']
    """
    made = list(_several(optimizers))
    of_model = get_model_state_dict(model, submodules=submodules, options=options)
    return of_model, get_optimizer_state_dict(model, made, submodules=submodules, options=options)


def set_model_state_dict(
    model: torch.nn.Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> _IncompatibleKeys:
    """Take over a model's whole state; every rank calls it. With ``broadcast_from_rank0`` only rank 0 needs to have it.

    Example:
        >>> import torch
        >>> from shardrt.compat import fully_shard, set_model_state_dict
        >>> model = fully_shard(torch.nn.Linear(2, 1))
        >>> set_model_state_dict(model, torch.nn.Linear(2, 1).state_dict())
        <All keys matched successfully>
    """
    tree = _tree_in(model)
    if tree is None:
        return torchs.set_model_state_dict(model, dict(model_state_dict), options=options)
    wanted = _checked(options, None)
    if not isinstance(model, (FSDPModule, OptimizerStates)):
        if wanted.broadcast_from_rank0:
            raise UnsupportedError(
                "broadcast_from_rank0 with a model of which only parts are sharded; give the state to every rank, or "
                "shard the whole model"
            )
        found: _IncompatibleKeys = model.load_state_dict(model_state_dict, strict=wanted.strict)
        return found
    with tree.whole():
        tree.runtime.load_state_dict(
            _inside(model), model_state_dict, strict=wanted.strict, rank0_only=wanted.broadcast_from_rank0
        )
        if wanted.broadcast_from_rank0 and tree.runtime.rank:
            return _IncompatibleKeys([], [])
        return incompatible_keys(_inside(model), model_state_dict)


def set_optimizer_state_dict(
    model: torch.nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Take over the whole state of one or several optimizers, by the names of the parameters; every rank calls it.

    Example:
        >>> import torch
        >>> from shardrt.compat import fully_shard, get_optimizer_state_dict, set_optimizer_state_dict
        >>> model = fully_shard(torch.nn.Linear(2, 1))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        >>> saved = get_optimizer_state_dict(model, optimizer)
        >>> other = torch.optim.AdamW(model.parameters())
        >>> set_optimizer_state_dict(model, other, saved)
        >>> other.param_groups[0]["lr"]
        0.5
    """
    tree = _tree_in(model)
    if tree is None:
        torchs.set_optimizer_state_dict(model, optimizers, dict(optim_state_dict), options=options)
        return
    wanted = _checked(options, None)
    for optimizer in _several(optimizers):
        names = tree.names()
        groups = [[names[param] for param in group["params"]] for group in optimizer.param_groups]
        mine = _part_for(groups, optim_state_dict)
        if wanted.broadcast_from_rank0:
            state = fsdp_state.scattered_state(tree, optimizer, mine if tree.runtime.rank == 0 else None)
        else:
            state = fsdp_state.state_to_load(tree, optimizer, mine)
        optimizer.load_state_dict(state)


def set_state_dict(
    model: torch.nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> _IncompatibleKeys:
    """Both; every rank calls it.

    Example:
        >>> import torch
        >>> from shardrt.compat import fully_shard, get_state_dict, set_state_dict
        >>> model = fully_shard(torch.nn.Linear(2, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> of_model, of_optimizer = get_state_dict(model, optimizer)
        >>> set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        <All keys matched successfully>
    """
    made = list(_several(optimizers))
    found = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, made, optim_state_dict, options=options)
    return found


def _tree_in(model: torch.nn.Module) -> ShardedTree | None:
    trees: list[ShardedTree] = []
    for module in model.modules():
        tree = (
            module._sharded()
            if isinstance(module, FSDPModule)
            else module.sharded_tree
            if isinstance(module, OptimizerStates)
            else None
        )
        if tree is not None and not any(tree is other for other in trees):
            trees.append(tree)
    if len(trees) > 1:
        raise UnsupportedError(
            f"{type(model).__name__} has {len(trees)} modules that were sharded each for itself; call this for one of "
            "them at a time, or shard the whole model"
        )
    return trees[0] if trees else None


def _inside(model: torch.nn.Module) -> torch.nn.Module:
    """What the runtime knows: not the wrapper."""
    inner: torch.nn.Module = getattr(model, "_fsdp_wrapped_module", model)
    return inner


def _checked(options: StateDictOptions | None, submodules: Any) -> StateDictOptions:
    wanted = options or StateDictOptions()
    if submodules:
        raise UnsupportedError("submodules= is not possible; take what you need from the whole state by its names")
    if wanted.broadcast_from_rank0 and not wanted.full_state_dict:
        raise ConfigError("broadcast_from_rank0=True is for whole states; set full_state_dict=True as well")
    return wanted


def _several(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def _frozen_names(model: torch.nn.Module) -> Iterator[str]:
    return (plain_name(name) for name, param in model.named_parameters() if not param.requires_grad)


@contextmanager
def _has_state(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """See Note [A form to load into]. Like torch, leaves an optimizer alone whose gradients are there to be stepped."""
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    if optimizer.state or any(param.grad is not None for param in params):
        yield
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for param in params:
            param.grad = torch.zeros_like(param)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        try:
            optimizer.step()
        finally:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                if rate is not None:
                    group["lr"] = rate
        yield
    finally:
        for param in params:
            param.grad = None
        optimizer.state.clear()


def _flattened(whole: Mapping[str, Any]) -> dict[str, Any]:
    """As torch does it: one level, the options of a group under each of its parameters."""
    flat = {f"state.{name}.{key}": value for name, values in whole["state"].items() for key, value in values.items()}
    for group in whole["param_groups"]:
        for name in group["params"]:
            flat |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
    return flat


def _part_for(groups: list[list[str]], state: Mapping[str, Any]) -> dict[str, Any]:
    """What belongs to an optimizer with these groups, of a state that may be several optimizers', or flat."""
    if not isinstance(state, Mapping):
        raise StateError(f"a state dict of an optimizer is a mapping, got {type(state).__name__}")
    if not state or "param_groups" in state:
        mine = {name for group in groups for name in group}
        found = [group for group in state.get("param_groups", ()) if mine.intersection(map(str, group["params"]))]
        return {**state, "param_groups": found or state.get("param_groups", [])} if state else {}
    by_param: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in state.items():
        kind, _, rest = key.partition(".")
        name, _, option = rest.rpartition(".")
        if kind in by_param and name:
            by_param[kind].setdefault(name, {})[option] = value
    options = by_param["param_groups"]
    return {
        "state": {name: by_param["state"][name] for group in groups for name in group if name in by_param["state"]},
        "param_groups": [{**options.get(group[0] if group else "", {}), "params": list(group)} for group in groups],
    }

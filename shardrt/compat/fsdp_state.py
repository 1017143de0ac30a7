"""State dicts of a sharded tree and of the optimizers that step it, in the forms that torch's FSDP has names for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import StateDictSettings, StateDictType

from shardrt.compat.sharded_tree import ShardedTree
from shardrt.errors import StateError
from shardrt.state.fitting import incompatible_keys
from shardrt.state.full import check_torch_state, slice_torch_state
from shardrt.state.handing_out import hand_out_optimizer
from shardrt.state.kinds import StateKind
from shardrt.state.optimizers import put_options
from shardrt.state.parts import MARK


def _kind(kind: StateDictType, config: Any) -> StateKind:
    return StateKind.read(kind, config)


def model_state_dict(tree: ShardedTree, module: torch.nn.Module, settings: StateDictSettings) -> dict[str, Any]:
    """The state of a module of the tree; every rank calls it."""
    kind = _kind(settings.state_dict_type, settings.state_dict_config)
    with tree.whole():
        made = tree.runtime._made(module, kind)
        return made if kind.kind == "full" else {key: _kept_apart(value) for key, value in made.items()}


def _kept_apart(state: Any) -> Any:
    """The same in memory of its own, as scripts of torch's expect: they keep it while training goes on."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _kept_apart(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_kept_apart(value) for value in state]
    return state


def load_model(tree: ShardedTree, module: torch.nn.Module, state: Any, *, strict: bool) -> Any:
    """Take over a state of any form; every rank calls it."""
    with tree.whole():
        tree.runtime.load_state_dict(module, state, strict=strict)
        return incompatible_keys(module, state)


def optimizer_state_dict(
    tree: ShardedTree, optimizer: torch.optim.Optimizer, settings: StateDictSettings
) -> dict[str, Any]:
    """The state of an optimizer of torch's over the tree's parts; every rank calls it."""
    return optimizer_state(tree, optimizer, _kind(settings.state_dict_type, settings.optim_state_dict_config))


def optimizer_state(tree: ShardedTree, optimizer: torch.optim.Optimizer, kind: StateKind) -> dict[str, Any]:
    """The same, in a form of ours."""
    made: dict[str, Any] = tree.runtime._made(tree.adopted(optimizer), kind)
    if kind.kind != "full" or not made:
        return {key: _kept_apart(value) for key, value in made.items()}
    return rekeyed(made, _names(made), by_name=True)


def _names(state: Mapping[str, Any]) -> list[str]:
    numbered = {
        number: name
        for group in state["param_groups"]
        for number, name in zip(group["params"], group.get("param_names", group["params"]), strict=True)
    }
    return [str(numbered[number]) for number in sorted(numbered)]


def rekeyed(state: Mapping[str, Any], names: Sequence[str], *, by_name: bool) -> dict[str, Any]:
    """A state by names, from one by the numbers of parameters, or the other way round."""
    keys: dict[Any, Any] = dict(enumerate(names)) if by_name else {name: number for number, name in enumerate(names)}

    def key(old: Any) -> Any:
        return old if old in keys.values() and old not in keys else keys[old]

    return {
        "state": {key(old): values for old, values in state["state"].items()},
        "param_groups": [
            {
                **{name: value for name, value in group.items() if name != "param_names"},
                "params": [key(old) for old in group["params"]],
            }
            for group in state["param_groups"]
        ],
    }


def state_to_load(tree: ShardedTree, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of a state of any form, as ``optimizer.load_state_dict`` takes it."""
    adopted = tree.adopted(optimizer)
    if MARK in state:
        if state[MARK].get("kind") == "sharded":
            before = {tensor: dict(values) for tensor, values in optimizer.state.items()}
            options = [dict(group) for group in adopted.param_groups]
            tree.runtime.load_state_dict(adopted, state)
            taken = {tensor: dict(values) for tensor, values in optimizer.state.items()}
            found = [{**group} for group in adopted.param_groups]
            adopted.replace_state(before)
            put_options(adopted, [{k: v for k, v in group.items() if k != "params"} for group in options])
            return _local(optimizer, taken, found)
        taken, groups, _ = tree.runtime._local(adopted, state, state[MARK])
        return _local(optimizer, taken, groups)
    plain = _by_numbers(tree, optimizer, state)
    return _local(optimizer, slice_torch_state(adopted, check_torch_state(adopted, plain)), plain["param_groups"])


def scattered_state(
    tree: ShardedTree, optimizer: torch.optim.Optimizer, state: Mapping[str, Any] | None
) -> dict[str, Any]:
    """This rank's part of a whole state that rank 0 has; every rank calls it."""
    adopted, runtime = tree.adopted(optimizer), tree.runtime
    by_param = options = None
    with runtime.agreeing("scattering a state dict"):
        if runtime.rank == 0:
            if not state:
                raise StateError("rank 0 has no state to hand out; pass what full_optim_state_dict returned there")
            plain = _by_numbers(tree, optimizer, state)
            by_param = check_torch_state(adopted, plain)
            options = [
                {key: value for key, value in group.items() if key not in ("params", "param_names")}
                for group in plain["param_groups"]
            ]
    taken, told, _ = hand_out_optimizer(
        adopted, by_param, options, None, runtime.negotiate(()), runtime._control, torch.device(runtime.device_type)
    )
    return _local(optimizer, taken, told or [])


def _by_numbers(tree: ShardedTree, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state by names as one by numbers, in the order of this optimizer's groups, whatever groups it had."""
    if not isinstance(state, Mapping) or "state" not in state or "param_groups" not in state:
        raise StateError("a state dict of an optimizer has 'state' and 'param_groups'; pass what optim_state_dict gave")
    groups = state["param_groups"]
    if not any(isinstance(key, str) for group in groups for key in group["params"]):
        return dict(state)
    names = tree.names()
    ours = [[names[param] for param in group["params"]] for group in optimizer.param_groups]
    theirs = {name for group in groups for name in group["params"]}
    missing = [name for group in ours for name in group if name not in theirs]
    if missing or len(groups) != len(ours):
        raise StateError(
            f"the state has {len(groups)} groups with {len(theirs)} parameters, this optimizer {len(ours)} groups; "
            f"missing: {', '.join(missing[:5]) or 'nothing'}; load the state of the same model and groups"
        )
    numbers = {name: number for number, name in enumerate(name for group in ours for name in group)}
    return {
        "state": {numbers[name]: values for name, values in state["state"].items() if name in numbers},
        "param_groups": [
            {**group, "params": [numbers[name] for name in mine], "param_names": list(mine)}
            for group, mine in zip(groups, ours, strict=True)
        ],
    }


def _local(
    optimizer: torch.optim.Optimizer, taken: Mapping[torch.Tensor, Any], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """In the form of the optimizer's own ``state_dict``."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = {param: number for number, param in enumerate(params)}
    made = []
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        made.append({**options, "params": [numbers[param] for param in own["params"]]})
    return {"state": {numbers[param]: values for param, values in taken.items()}, "param_groups": made}

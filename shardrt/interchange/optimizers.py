"""Optimizers' state dicts, numbered or named, nested or flattened, and the portable form of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardrt.errors import StateError
from shardrt.interchange.naming import LIKE_THE_PARAMETER, few, names_of_numbers
from shardrt.state.portable import LazyTensor, PortableOptimizer

_FLAT = ("state.", "param_groups.")


def looks_like_optimizer(value: Any) -> bool:
    """Whether a value is the state dict of an optimizer: nested as torch.optim's, or flattened as FSDP2's may be."""
    if not isinstance(value, Mapping) or not value:
        return False
    if set(value) >= {"state", "param_groups"}:
        return isinstance(value["state"], Mapping) and isinstance(value["param_groups"], (list, tuple))
    return all(isinstance(key, str) and key.startswith(_FLAT) for key in value)


def optimizer_from_dict(
    raw: Mapping[str, Any],
    *,
    where: str,
    model: Mapping[str, LazyTensor] | None = None,
    names: Sequence[str] | None = None,
    lazily: Callable[[torch.Tensor], LazyTensor] = LazyTensor.of,
) -> PortableOptimizer:
    """The portable form of an optimizer's state dict. See Note [Numbered parameters] for what parameters are called.

    Example:
        >>> import torch
        >>> from shardrt.interchange.optimizers import optimizer_from_dict
        >>> layer = torch.nn.Linear(2, 1)
        >>> opt = torch.optim.SGD(layer.named_parameters(), lr=0.1, momentum=0.9)
        >>> layer(torch.ones(2)).sum().backward()
        >>> opt.step()
        >>> sorted(optimizer_from_dict(opt.state_dict(), where="opt").state)
        ['bias', 'weight']
    """
    if not looks_like_optimizer(raw):
        raise StateError(
            f"{where} is not an optimizer's state dict: expected the keys 'state' and 'param_groups', got {few(raw)}"
        )
    if "param_groups" not in raw or "state" not in raw:
        raw = _nested(raw, where)
    groups, state = raw["param_groups"], raw["state"]
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            raise StateError(f"{where} has a parameter group without a list of its 'params'")
        if not all(isinstance(key, (int, str)) for key in group["params"]):
            raise StateError(f"{where} has a parameter group whose 'params' are neither numbers nor names")
    called = names_of_numbers(groups, model=model, names=names, where=where)
    if len(called) != sum(len(group["params"]) for group in groups):
        raise StateError(f"{where} lists a parameter twice in its groups")
    if strangers := [key for key in state if key not in called]:
        raise StateError(f"{where} has state for {few(strangers)}, which no parameter group lists")
    found: dict[str, dict[str, Any]] = {}
    for key, entry in state.items():
        if not isinstance(entry, Mapping) or not all(isinstance(each, str) for each in entry):
            raise StateError(f"{where}: the state of {called[key]} is not a mapping with texts as keys")
        found[called[key]] = {
            each: lazily(value) if isinstance(value, torch.Tensor) else value for each, value in entry.items()
        }
    if model is not None:
        _check_shapes(found, model, where)
    return PortableOptimizer(
        groups=tuple(
            {
                **{option: value for option, value in group.items() if option not in ("params", "param_names")},
                "params": [called[key] for key in group["params"]],
            }
            for group in groups
        ),
        state=found,
        step=_updates(found),
    )


def dict_from_optimizer(
    optimizer: PortableOptimizer, whole: Callable[[Any], Any], *, numbered: bool, named: bool = True
) -> dict[str, Any]:
    """The state dict of a portable optimizer: numbered as torch.optim's, or by names as FSDP2's.

    Example:
        >>> from shardrt.interchange.optimizers import dict_from_optimizer
        >>> from shardrt.state.portable import PortableOptimizer
        >>> portable = PortableOptimizer(groups=({"lr": 0.1, "params": ["w"]},), state={"w": {"step": 3}})
        >>> dict_from_optimizer(portable, lambda value: value, numbered=True)
        {'state': {0: {'step': 3}}, 'param_groups': [{'lr': 0.1, 'params': [0], 'param_names': ['w']}]}
    """
    listed = [name for group in optimizer.groups for name in group["params"]]
    key_of: dict[str, Any] = {name: number if numbered else name for number, name in enumerate(listed)}
    if strangers := [name for name in optimizer.state if name not in key_of]:
        raise StateError(f"the optimizer has state for {few(strangers)}, which no parameter group lists")
    groups = []
    for group in optimizer.groups:
        options = {option: whole(value) for option, value in group.items() if option not in ("params", "param_names")}
        options["params"] = [key_of[name] for name in group["params"]]
        if numbered and named:
            options["param_names"] = list(group["params"])
        groups.append(options)
    ordered = [name for name in listed if name in optimizer.state]
    return {
        "state": {
            key_of[name]: {each: whole(value) for each, value in optimizer.state[name].items()} for name in ordered
        },
        "param_groups": groups,
    }


def flattened(nested: Mapping[str, Any]) -> dict[str, Any]:
    """A named state dict as FSDP2 flattens it: one entry per parameter and key, groups repeated per parameter."""
    flat: dict[str, Any] = {}
    for name, entry in nested["state"].items():
        flat.update({f"state.{name}.{key}": value for key, value in entry.items()})
    for group in nested["param_groups"]:
        for name in group["params"]:
            flat.update({f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"})
    return flat


def _nested(flat: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The inverse of :func:`flattened`: parameters with equal options, side by side or not, are one group again."""
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        part, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        if not name:
            raise StateError(f"{where} has the entry {key!r}, which names no parameter")
        (state if part == "state" else options).setdefault(name, {})[last] = value
    groups: list[dict[str, Any]] = []
    for name, of_name in options.items():
        for group in groups:
            if _same({key: value for key, value in group.items() if key != "params"}, of_name):
                group["params"].append(name)
                break
        else:
            groups.append({**of_name, "params": [name]})
    return {"state": state, "param_groups": groups}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


def _check_shapes(state: Mapping[str, Mapping[str, Any]], model: Mapping[str, LazyTensor], where: str) -> None:
    for name, entry in state.items():
        for key in LIKE_THE_PARAMETER & entry.keys():
            value = entry[key]
            if isinstance(value, LazyTensor) and value.shape not in (model[name].shape, ()):
                raise StateError(
                    f"{where}: {key!r} of {name} has the shape {value.shape}, but the parameter {model[name].shape}: "
                    "the names are in another order than the optimizer's. Pass names= in its order"
                )


def _updates(state: Mapping[str, Mapping[str, Any]]) -> int:
    """Updates made, as far as the state says: the largest ``step`` in it."""
    most = 0
    for entry in state.values():
        step = entry.get("step")
        if isinstance(step, LazyTensor) and step.numel == 1:
            step = step.read(0, 1).item()
        if isinstance(step, (int, float)) and not isinstance(step, bool) and 0 <= step < 2**53:
            most = max(most, int(step))
    return most

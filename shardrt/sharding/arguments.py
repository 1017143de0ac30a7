"""What ``rt.shard`` is given for the optimizer: its options, and groups of parameters with options of their own."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardrt.errors import ConfigError
from shardrt.registry.nearness import did_you_mean

Named = list[tuple[str, torch.nn.Parameter]]


def check_defaults(
    optimizer_class: type[torch.optim.Optimizer], defaults: Mapping[str, Any], others: Collection[str]
) -> None:
    """Whatever is no argument of ``rt.shard`` goes to the optimizer, also what was meant for one of its ``others``.

    Example:
        >>> import torch
        >>> from shardrt.sharding.arguments import check_defaults
        >>> check_defaults(torch.optim.AdamW, {"lr": 0.1}, ["strategy"])
        >>> check_defaults(torch.optim.AdamW, {"stategy": "full_shard"}, ["strategy"])
        Traceback (most recent call last):
        shardrt.errors.ConfigError: stategy= is an argument neither of rt.shard nor of AdamW; did you mean 'strategy'?
    """
    try:
        takes = inspect.signature(optimizer_class).parameters
    except (TypeError, ValueError):  # what it takes, it alone can tell
        return
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values()):
        return
    for name in defaults:
        if name == "params" or name not in takes:
            near = did_you_mean(name, {*takes, *others} - {"params"})
            raise ConfigError(
                f"{name}= is an argument neither of rt.shard nor of {optimizer_class.__name__}"
                f"{near or '; groups of parameters go into param_groups='}"
            )


def ignored_things(modules: Any, params: Any) -> tuple[list[torch.nn.Module], list[torch.nn.Parameter]]:
    """What is to be left alone, as lists: the modules and parameters themselves, since a name would match nothing.

    Example:
        >>> import torch
        >>> from shardrt.sharding.arguments import ignored_things
        >>> ignored_things([], ["0.weight"])
        Traceback (most recent call last):
        shardrt.errors.ConfigError: ignored_parameters= takes parameters themselves, got '0.weight'; pass ...
    """
    return (
        _all_of(modules, torch.nn.Module, "ignored_modules= takes modules", "model.get_submodule(name)"),
        _all_of(params, torch.nn.Parameter, "ignored_parameters= takes parameters", "model.get_parameter(name)"),
    )


def _all_of(given: Any, kind: type, takes: str, fix: str) -> list[Any]:
    listed = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, torch.Tensor)) else [given]
    for one in listed:
        if not isinstance(one, kind):
            raise ConfigError(f"{takes} themselves, got {one!r}; pass {fix}")
    return listed


def grouped(module: torch.nn.Module, named: Named, given: Any) -> list[dict[str, Any]]:
    """Groups as optimizers of torch's take them, or a function of the module that makes them, with names.

    What is not trained need not be in any; whatever is trained must be in one.

    Example:
        >>> import torch
        >>> from shardrt.sharding.arguments import grouped
        >>> layer = torch.nn.Linear(2, 1)
        >>> named = list(layer.named_parameters())
        >>> grouped(layer, named, [[layer.weight], [layer.bias]])
        Traceback (most recent call last):
        shardrt.errors.ConfigError: param_groups= must be mappings with 'params', as optimizers of torch's take ...
        >>> groups = grouped(layer, named, lambda module: [{"params": module.parameters()}])
        >>> [name for name, _ in groups[0]["params"]]
        ['weight', 'bias']
    """
    names = {param: name for name, param in named}
    groups: list[dict[str, Any]] = []
    made = given(module) if callable(given) else given
    if not isinstance(made, Iterable):
        raise ConfigError(f"param_groups= must be groups, or a function that makes them; got {made!r}")
    for group in made:
        if not isinstance(group, Mapping) or "params" not in group:
            raise ConfigError(
                "param_groups= must be mappings with 'params', as optimizers of torch's take them; got a "
                f"{type(group).__name__}"
            )
        params = group["params"]
        listed: Sequence[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
        own = [entry[1] if isinstance(entry, tuple) else entry for entry in listed]
        strangers = sum(param not in names for param in own)
        if strangers:
            raise ConfigError(
                f"group {len(groups)} of param_groups= has {strangers} parameters that are not of this module, or are "
                "ignored; make the groups from the module that is sharded"
            )
        groups.append({**group, "params": [(names[param], param) for param in own]})
    inside = {param for group in groups for _, param in group["params"]}
    missing = [name for name, param in named if param not in inside and param.requires_grad]
    if missing or not groups:
        raise ConfigError(
            f"parameters in no group of param_groups=: {', '.join(missing[:5])}{' ...' * (len(missing) > 5)}; put them "
            "into one, freeze them, or name them in ignored_parameters="
        )
    groups[-1]["params"] += [(name, param) for name, param in named if param not in inside]
    return groups

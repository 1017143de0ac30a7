"""Which parts of a module are gathered together: units, chosen by class, by size, by a function, or by hand.

Note [Who has a parameter]: the root is always a unit. Every other parameter belongs to the innermost unit around the
module that has it. A parameter that modules of several units share (tied weights) belongs to the innermost unit around
all of them, so that it is there for each, and exists once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from shardrt.errors import ConfigError

Policy = Callable[..., Any]


@attrs.frozen(kw_only=True, eq=False)
class Unit:
    """A module whose own parameters (those of no unit inside it) come and go together."""

    name: str
    module: torch.nn.Module
    params: tuple[str, ...]
    """Their names, seen from the root."""
    within: str | None = None
    """The unit that this is a part of, see :mod:`shardrt.sharding.dividing`; None for what the user calls a unit."""


def find_units(
    root: torch.nn.Module,
    units: Any = None,
    *,
    ignored_modules: Iterable[torch.nn.Module] = (),
    ignored_parameters: Iterable[torch.nn.Parameter] = (),
) -> list[Unit]:
    """The units of a module, the root first, in the order of its modules. See Note [Who has a parameter].

    ``units`` is None (the largest repeated blocks, see :func:`repeated_blocks`), a class or several, a number of
    parameters from which a module is a unit of its own, a function of a module, a policy of torch's
    ``auto_wrap_policy`` kind, or the modules themselves.

    Example:
        >>> import torch
        >>> from shardrt.sharding.units import find_units
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        >>> [(unit.name, unit.params) for unit in find_units(model, torch.nn.Linear)]
        [('', ('2.weight', '2.bias')), ('0', ('0.weight', '0.bias')), ('1', ('1.weight', '1.bias'))]
    """
    ignored = {module for given in ignored_modules for module in given.modules()}
    left_out = {*ignored_parameters, *(param for module in ignored for param in module.parameters(recurse=False))}
    return units_among(root, _chosen(root, units, ignored) - ignored - {root}, left_out)


def units_among(
    root: torch.nn.Module, chosen: Collection[torch.nn.Module], left_out: Collection[torch.Tensor]
) -> list[Unit]:
    """The root and those of the chosen modules that have parameters of their own, which are not left out.

    Example:
        >>> import torch
        >>> from shardrt.sharding.units import units_among
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        >>> [unit.name for unit in units_among(model, {model[1]}, {model[0].bias})]
        ['', '1']
    """
    owners = _owners(root, chosen)
    found: dict[str, list[str]] = {"": []}
    modules: dict[str, torch.nn.Module] = {"": root}
    for name, module in root.named_modules():
        if module in chosen:
            found[name], modules[name] = [], module
    for name, param in root.named_parameters():
        if param not in left_out:
            found[owners[param]].append(name)
    return [
        Unit(name=name, module=modules[name], params=tuple(params))
        for name, params in found.items()
        if params or not name
    ]


def repeated_blocks(root: torch.nn.Module) -> set[torch.nn.Module]:
    """Blocks as most models have them: the items of ``ModuleList`` and ``Sequential`` containers that hold most of
    the parameters in several modules of one class.

    Example:
        >>> import torch
        >>> from shardrt.sharding.units import repeated_blocks
        >>> layers = [torch.nn.TransformerEncoderLayer(8, 2) for _ in range(3)]
        >>> model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 8), "layers": torch.nn.ModuleList(layers)})
        >>> len(repeated_blocks(model))
        3
    """
    found: set[torch.nn.Module] = set()

    def look(module: torch.nn.Module) -> None:
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
            kinds: dict[type, list[torch.nn.Module]] = {}
            for child in module.children():
                kinds.setdefault(type(child), []).append(child)
            blocks = [
                child
                for same in kinds.values()
                if len(same) > 1
                for child in same
                if any(True for _ in child.parameters()) and not isinstance(child, (torch.nn.ModuleList,))
            ]
            if blocks:
                found.update(blocks)
                return
        for child in module.children():
            look(child)

    look(root)
    return found


def _chosen(root: torch.nn.Module, units: Any, ignored: Collection[torch.nn.Module]) -> set[torch.nn.Module]:
    if units is None:
        return repeated_blocks(root)
    modules = [module for module in root.modules() if module not in ignored]
    if isinstance(units, type) and issubclass(units, torch.nn.Module):
        units = (units,)
    if isinstance(units, bool) or (isinstance(units, (int, float)) and units <= 0):
        raise ConfigError(f"units={units!r} is not possible; give a number of parameters from 1 up, classes or modules")
    if isinstance(units, (int, float)):
        return _by_size(root, int(units), set(ignored))
    if isinstance(units, (Sequence, set, frozenset)) and not isinstance(units, str):
        return _listed(units, modules)
    if hasattr(units, "_run_policy"):  # a policy object of torch's (ModuleWrapPolicy, CustomPolicy)
        return _by_policy(units._run_policy(root, set(ignored), {}))
    if callable(units):
        return _by_function(root, units, set(ignored))
    raise ConfigError(
        f"units={units!r} is not possible; give module classes, modules, a number of parameters, or a function of a "
        "module"
    )


def _by_policy(chosen: Mapping[torch.nn.Module, Mapping[str, Any]]) -> set[torch.nn.Module]:
    for module, options in chosen.items():
        if options:
            raise ConfigError(
                f"the policy gives {type(module).__name__} options of its own ({', '.join(options)}), but all units of "
                "a module are sharded alike; let it return True"
            )
    return set(chosen)


def _listed(units: Iterable[Any], modules: Sequence[torch.nn.Module]) -> set[torch.nn.Module]:
    found: set[torch.nn.Module] = set()
    classes = tuple(one for one in units if isinstance(one, type))
    for one in units:
        if isinstance(one, torch.nn.Module):
            if one not in modules:
                raise ConfigError(f"a unit of class {type(one).__name__} is no part of the module that is sharded")
            found.add(one)
        elif not (isinstance(one, type) and issubclass(one, torch.nn.Module)):
            raise ConfigError(f"units may be module classes or modules, got {one!r}")
    return found | {module for module in modules if classes and isinstance(module, classes)}


def _by_size(root: torch.nn.Module, least: int, ignored: set[torch.nn.Module]) -> set[torch.nn.Module]:
    """Innermost first: a module is a unit once what is left in it reaches the size."""
    found: set[torch.nn.Module] = set()

    def left_in(module: torch.nn.Module) -> int:
        if module in ignored:
            return 0
        own = sum(param.numel() for param in module.parameters(recurse=False))
        total = own + sum(left_in(child) for child in module.children())
        if total >= least and not isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            found.add(module)
            return 0
        return total

    for child in root.children():
        left_in(child)
    return found


def _by_function(root: torch.nn.Module, policy: Policy, ignored: set[torch.nn.Module]) -> set[torch.nn.Module]:
    """A function of a module; or one of torch's, which takes ``module, recurse, nonwrapped_numel``."""
    inner = policy
    while isinstance(inner, functools.partial):
        inner = inner.func
    try:
        names = set(inspect.signature(inner).parameters)
    except (TypeError, ValueError):
        names = set()
    if "recurse" not in names:
        return {module for module in root.modules() if module not in ignored and policy(module)}
    found: set[torch.nn.Module] = set()

    def look(module: torch.nn.Module) -> int:
        """How many of its parameters are in units now."""
        total = sum(param.numel() for param in module.parameters() if param.numel())
        if not policy(module=module, recurse=True, nonwrapped_numel=total):
            return 0
        return sum(visit(child) for child in module.children() if child not in ignored)

    def visit(module: torch.nn.Module) -> int:
        total = sum(param.numel() for param in module.parameters())
        wrapped = look(module)
        if policy(module=module, recurse=False, nonwrapped_numel=total - wrapped):
            found.add(module)
            return total
        return wrapped

    look(root)
    return found


def _owners(root: torch.nn.Module, chosen: Collection[torch.nn.Module]) -> Mapping[torch.Tensor, str]:
    """The unit of each parameter: the innermost around every module that has it."""
    paths: dict[torch.Tensor, tuple[str, ...]] = {}

    def walk(module: torch.nn.Module, path: tuple[str, ...], above: tuple[torch.nn.Module, ...]) -> None:
        if module in above:  # a module inside itself
            return
        if module in chosen:
            path = (*path, first_name[module])
        for param in module.parameters(recurse=False):
            paths[param] = _common(paths[param], path) if param in paths else path
        for child in module.children():
            walk(child, path, (*above, module))

    first_name = {module: name for name, module in root.named_modules()}
    walk(root, ("",), ())
    return {param: path[-1] for param, path in paths.items()}


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    same = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        same += 1
    return one[:same]

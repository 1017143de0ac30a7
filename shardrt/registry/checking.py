"""Whether a plugin speaks our hooks, decided before any of them is called."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from types import MappingProxyType, ModuleType

import pluggy

from shardrt.errors import HookSignatureError, HookVersionError
from shardrt.registry import hookspecs
from shardrt.registry.discovery import Origin
from shardrt.registry.hookspecs import HOOK_VERSION, PROJECT
from shardrt.registry.nearness import did_you_mean, listed

VERSION_ATTRIBUTE = "SHARDRT_HOOK_VERSION"

HOOK_ARGUMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        name: tuple(inspect.signature(function).parameters)
        for name, function in vars(hookspecs).items()
        if hasattr(function, f"{PROJECT}_spec")
    }
)
"""Every hook, in the order in which the specifications are written, with the arguments it offers."""


def check_plugin(plugin: object, origin: Origin) -> tuple[str, ...]:
    """The names of the known hooks it implements, or an error that says what its author has to change.

    Example:
        >>> import shardrt
        >>> from shardrt.registry.checking import check_plugin
        >>> from shardrt.registry.discovery import Origin
        >>> class Observer:
        ...     @shardrt.hookimpl
        ...     def shardrt_step_finished(self, step): ...
        >>> check_plugin(Observer(), Origin(name="Observer"))
        ('shardrt_step_finished',)
    """
    _check_version(plugin, origin)
    if inspect.isclass(plugin):
        raise HookSignatureError(
            f"{origin} is a class, whose methods could not be called: "
            f"hand over or point the entry point to an instance, {plugin.__name__}(), or a module"
        )
    implementations = _implementations(plugin, origin)
    for hook, implementation in implementations:
        _check_implementation(hook, implementation, origin)
    implemented = {hook for hook, _ in implementations}
    _check_unmarked(plugin, origin, implemented)
    if not implemented:
        raise HookSignatureError(
            f"{origin} implements no hook; mark its functions with @shardrt.hookimpl, or {origin.remedy}"
        )
    return tuple(hook for hook in HOOK_ARGUMENTS if hook in implemented)


def _check_version(plugin: object, origin: Origin) -> None:
    ours = ".".join(map(str, HOOK_VERSION))
    module = plugin if isinstance(plugin, ModuleType) else sys.modules.get(type(plugin).__module__)
    declared = getattr(plugin, VERSION_ATTRIBUTE, getattr(module, VERSION_ATTRIBUTE, "1.0"))
    if not isinstance(declared, str) or not re.fullmatch(r"[0-9]+\.[0-9]+", declared):
        raise HookVersionError(
            f"{origin} has {VERSION_ATTRIBUTE} = {declared!r}, which is no version; "
            f'write it as text like "{ours}", the version of the hooks it was made for, or {origin.remedy}'
        )
    major, minor = map(int, declared.split("."))
    if major == HOOK_VERSION[0] and minor <= HOOK_VERSION[1]:
        return
    if (major, minor) > HOOK_VERSION:
        fix = "upgrade shardrt (pip install --upgrade shardrt), or install an older version of the plugin"
    else:
        fix = origin.remedy
    raise HookVersionError(
        f"{origin} was made for hook version {declared}, and this shardrt speaks hook version {ours}; {fix}"
    )


def _implementations(plugin: object, origin: Origin) -> list[tuple[str, pluggy.HookImpl]]:
    # A manager without specifications takes anything, so that each fault can be told in our own words.
    manager = pluggy.PluginManager(PROJECT)
    manager.register(plugin, name=origin.name)
    return [
        (caller.name, implementation)
        for caller in manager.get_hookcallers(plugin) or ()
        for implementation in caller.get_hookimpls()
    ]


def _check_implementation(hook: str, implementation: pluggy.HookImpl, origin: Origin) -> None:
    if hook not in HOOK_ARGUMENTS:
        if implementation.optionalhook:
            return
        raise HookSignatureError(
            f"{origin} implements an unknown hook {hook!r}; hooks: {listed(HOOK_ARGUMENTS)}"
            f"{did_you_mean(hook, HOOK_ARGUMENTS) or ';'} "
            f"rename it, mark it @shardrt.hookimpl(optionalhook=True) if it is of a newer version, or {origin.remedy}"
        )
    if implementation.wrapper or implementation.hookwrapper:
        raise HookSignatureError(
            f"{origin} wraps the hook {hook!r}, but hooks are called for each plugin alone; "
            f"implement it without wrapper=True, or {origin.remedy}"
        )
    parameters = inspect.signature(implementation.function).parameters.values()
    offered = ", ".join(HOOK_ARGUMENTS[hook])
    got = ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)
    told = f"{origin} implements {hook}({got}), but the hook has the arguments ({offered})"
    unknown = [parameter.name for parameter in parameters if parameter.name not in HOOK_ARGUMENTS[hook]]
    unfillable = [parameter.name for parameter in parameters if not _is_filled(parameter)]
    if unfillable:
        raise HookSignatureError(
            f"{told}: {', '.join(map(repr, unfillable))} would never be filled; "
            f"take plain arguments, without *, ** or a default, or {origin.remedy}"
        )
    if unknown:
        near = did_you_mean(unknown[0], HOOK_ARGUMENTS[hook])
        raise HookSignatureError(
            f"{told}: {', '.join(map(repr, unknown))} {'does' if len(unknown) == 1 else 'do'} not exist{near or ';'} "
            f"take only arguments that exist, fewer are fine, or {origin.remedy}"
        )


def _is_filled(parameter: inspect.Parameter) -> bool:
    # pluggy passes by position, and only what has no default: anything else would silently keep its default.
    plain = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return plain and parameter.default is parameter.empty


def _check_unmarked(plugin: object, origin: Origin, implemented: set[str]) -> None:
    for hook in HOOK_ARGUMENTS:
        if hook not in implemented and callable(inspect.getattr_static(plugin, hook, None)):
            raise HookSignatureError(
                f"{origin} has a function {hook} that is not marked as a hook implementation and would never be "
                f"called; decorate it with @shardrt.hookimpl, or {origin.remedy}"
            )

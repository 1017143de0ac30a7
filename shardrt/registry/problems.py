"""Messages about plugins: what was asked for, what there is, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import attrs

from shardrt.errors import PluginConflictError, PluginError, UnknownPluginError
from shardrt.registry.collecting import describe
from shardrt.registry.discovery import IN_PROCESS, Origin
from shardrt.registry.nearness import did_you_mean, listed
from shardrt.registry.records import Record

Status = Literal["ok", "failed", "not allowed"]


@attrs.frozen(kw_only=True)
class PluginInfo:
    """One plugin as it was found.

    Example:
        >>> import shardrt
        >>> class Observer:
        ...     @shardrt.hookimpl
        ...     def shardrt_step_finished(self, step): ...
        >>> info = shardrt.load_registry(plugins=[Observer()]).plugins[-1]
        >>> info.name, info.distribution, info.status, info.records
        ('Observer', 'in process', 'ok', ())
    """

    name: str
    distribution: str
    version: str
    status: Status
    problem: str = ""
    """Why it is not in use; empty when it is."""
    records: tuple[Record, ...] = ()
    origin: Origin = attrs.field(repr=False)
    error: PluginError | None = attrs.field(default=None, repr=False, eq=False)

    @classmethod
    def of(
        cls,
        origin: Origin,
        status: Status,
        *,
        problem: str = "",
        records: tuple[Record, ...] = (),
        error: PluginError | None = None,
    ) -> PluginInfo:
        """The information about the plugin that comes from ``origin``."""
        return cls(
            name=origin.name,
            distribution=origin.distribution,
            version=origin.version,
            status=status,
            problem=problem,
            records=records,
            origin=origin,
            error=error,
        )


def failure_of(name: object, plugins: Iterable[PluginInfo]) -> PluginError | None:
    """A fresh copy of the error of the failed plugin with this entry-point name, chained to its cause."""
    for plugin in plugins:
        if plugin.error is not None and name in (plugin.name, plugin.origin.alias):
            # Raising the stored object again would make its traceback grow with every question.
            error = type(plugin.error)(str(plugin.error))
            error.__cause__ = plugin.error.__cause__
            return error
    return None


def unknown_name(
    what: str, name: object, known: Sequence[str], plugins: Iterable[PluginInfo], *, elsewhere: str = ""
) -> UnknownPluginError:
    """The error for a name that nothing registers; ``what`` is like ``backend {name} for device type 'cpu'``.

    Example:
        >>> from shardrt.registry.problems import unknown_name
        >>> print(unknown_name("schedule {name}", "sinc", ["sync"], ()))
        unknown schedule 'sinc'; installed: sync; did you mean 'sync'?
        if it comes from a plugin, install its distribution, e.g. pip install shardrt-sinc
    """
    plugins = tuple(plugins)
    lines = [f"unknown {what.format(name=repr(name))}; installed: {listed(known)}{did_you_mean(name, known)}"]
    if elsewhere:
        lines.append(elsewhere)
    excluded = [
        plugin for plugin in plugins if plugin.status == "not allowed" and name in (plugin.name, plugin.origin.alias)
    ]
    lines.extend(plugin.problem for plugin in excluded)
    if not excluded and not elsewhere:
        named = isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9_-]*", name)
        example = f", e.g. pip install shardrt-{name}" if named else ""
        lines.append(f"if it comes from a plugin, install its distribution{example}")
    lines.extend(f"not in use: {plugin.problem}" for plugin in plugins if plugin.status == "failed")
    return UnknownPluginError("\n".join(lines))


def conflict(record: Record, first: Origin, second: Origin, in_use: Sequence[Origin]) -> PluginConflictError:
    """The error for two plugins that register the same thing; ``in_use`` are all that are."""
    installed = [origin for origin in (first, second) if origin.distribution != IN_PROCESS]
    # Of two, the one to do without is rather the stranger than a built-in.
    spare = max(installed, key=lambda origin: (origin.distribution != "shardrt", origin is second), default=None)
    fixes = []
    if len(installed) < 2:
        fixes.append("rename the record of the one that was handed over")
    if len({origin.distribution for origin in installed}) == 2 and spare:
        fixes.append(f"uninstall one of them (pip uninstall {spare.distribution})")
    if spare:
        others = listed(origin.name for origin in in_use if origin is not spare and origin.distribution != IN_PROCESS)
        fixes.append(f"set SHARDRT_PLUGINS to an allow-list without it (SHARDRT_PLUGINS={others.replace(', ', ',')!r})")
    return PluginConflictError(
        f"two plugins register the {describe(record)}: {first} and {second}; which one would win is undefined: "
        + ", or ".join(fixes)
    )

"""What the installed plugins offer, checked and looked up by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import attrs
import pluggy

from shardrt.registry.checking import HOOK_ARGUMENTS
from shardrt.registry.collecting import KINDS, RECORD_TYPES
from shardrt.registry.discovery import IN_PROCESS
from shardrt.registry.problems import PluginInfo, failure_of, unknown_name
from shardrt.registry.records import (
    BackendRecord,
    JoinPolicyRecord,
    PartitionerRecord,
    PlaceRecord,
    Record,
    ScheduleRecord,
    StateFormatRecord,
)

R = TypeVar("R", bound=Record)
ANY_DEVICE = "*"


@attrs.frozen(kw_only=True)
class Entry(Generic[R]):
    """A record and where it comes from."""

    record: R
    plugin: str
    distribution: str
    version: str


class _Collection(Generic[R]):
    """The records of one kind, in the order of their keys."""

    def __init__(self, record_type: type[R], plugins: tuple[PluginInfo, ...]) -> None:
        entries = [
            Entry(record=record, plugin=plugin.name, distribution=plugin.distribution, version=plugin.version)
            for plugin in plugins
            for record in plugin.records
            if isinstance(record, record_type)
        ]
        self._plugins = plugins
        self._kind = KINDS[record_type]
        self._entries = {entry.record.key: entry for entry in sorted(entries, key=lambda entry: entry.record.key)}

    def __iter__(self) -> Iterator[Entry[R]]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)


class NamedCollection(_Collection[R]):
    """Partitioners, schedules and the other kinds that are looked up by name.

    Example:
        >>> import shardrt
        >>> class Plugin:
        ...     @shardrt.hookimpl
        ...     def shardrt_schedules(self):
        ...         yield shardrt.ScheduleRecord(name="mine", summary="my order", factory=object)
        >>> schedules = shardrt.load_registry(plugins=[Plugin()]).schedules
        >>> schedules.get("mine").summary
        'my order'
        >>> [entry.distribution for entry in schedules if entry.record.name == "mine"]
        ['in process']
    """

    def get(self, name: str) -> R:
        """The record of this name; otherwise an error that says what is installed and what to install."""
        entry = self._entries.get((name,))
        if entry is not None:
            return entry.record
        known = [entry.record.name for entry in self]
        raise failure_of(name, self._plugins) or unknown_name(f"{self._kind} {{name}}", name, known, self._plugins)


class BackendCollection(_Collection[BackendRecord]):
    """Backends: looked up by device type and name, where a backend for any device (``"*"``) is the second choice.

    Example:
        >>> import shardrt
        >>> class Plugin:
        ...     @shardrt.hookimpl
        ...     def shardrt_backends(self):
        ...         yield shardrt.BackendRecord(name="mine", device_type="*", summary="my wires", factory=object)
        >>> shardrt.load_registry(plugins=[Plugin()]).backends.get("cuda", "mine").device_type
        '*'
    """

    def get(self, device_type: str, name: str) -> BackendRecord:
        """The record for this device type; otherwise an error that says what is installed and what to install."""
        entry = self._entries.get((device_type, name)) or self._entries.get((ANY_DEVICE, name))
        if entry is not None:
            return entry.record
        known = [entry.record.name for entry in self if entry.record.device_type in (device_type, ANY_DEVICE)]
        devices = ", ".join(entry.record.device_type for entry in self if entry.record.name == name)
        raise failure_of(name, self._plugins) or unknown_name(
            f"backend {{name}} for device type {device_type!r}",
            name,
            known,
            self._plugins,
            elsewhere=f"{name!r} is for device type {devices}: train there, or choose another" if devices else "",
        )


class Registry:
    """Every plugin in use. Made by :func:`shardrt.load_registry`.

    Example:
        >>> import shardrt
        >>> class Observer:
        ...     @shardrt.hookimpl
        ...     def shardrt_step_finished(self, step):
        ...         print("step", step)
        >>> registry = shardrt.load_registry(plugins=[Observer()])
        >>> for call in registry.lifecycle("shardrt_step_finished"):
        ...     call(runtime=None, step=7, seconds=0.1)
        step 7
    """

    def __init__(self, manager: pluggy.PluginManager, plugins: tuple[PluginInfo, ...], *, traced: bool) -> None:
        self.plugins = plugins
        """All that were found, those not in use included, with the reason."""
        self.partitioners = NamedCollection(PartitionerRecord, plugins)
        self.backends = BackendCollection(BackendRecord, plugins)
        self.schedules = NamedCollection(ScheduleRecord, plugins)
        self.state_formats = NamedCollection(StateFormatRecord, plugins)
        self.places = NamedCollection(PlaceRecord, plugins)
        self.join_policies = NamedCollection(JoinPolicyRecord, plugins)
        self._manager = manager
        self._traced = traced
        self._lifecycle: Mapping[str, tuple[Callable[..., object], ...]] = MappingProxyType(
            {hook: self._compile(hook) for hook in HOOK_ARGUMENTS if hook not in RECORD_TYPES}
        )

    @property
    def hook(self) -> pluggy.HookRelay:
        """Calls a hook on all plugins: ``registry.hook.shardrt_rank_failed(runtime=..., rank=..., error=...)``."""
        return self._manager.hook

    def versions(self) -> dict[str, str]:
        """What all ranks must share: plugin name to distribution and version.

        An observer that one rank alone hands over (progress on rank 0, say) registers nothing and is left out.
        """
        return {
            plugin.name: plugin.origin.label
            for plugin in self.plugins
            if plugin.status == "ok" and (plugin.records or plugin.distribution != IN_PROCESS)
        }

    def lifecycle(self, hook_name: str) -> tuple[Callable[..., object], ...]:
        """The implementations of a lifecycle hook as plain functions of all its arguments, by keyword.

        They come in the order in which the hook would call them; the step path calls these instead of the hook.
        """
        return self._lifecycle[hook_name]

    def _compile(self, hook_name: str) -> tuple[Callable[..., object], ...]:
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook_name)
        implementations = caller.get_hookimpls()
        if self._traced:
            # Tracing watches the hook itself: worth its price only when asked for.
            return (caller,) if implementations else ()
        return tuple(_plain(implementation, HOOK_ARGUMENTS[hook_name]) for implementation in reversed(implementations))


def _plain(implementation: pluggy.HookImpl, offered: tuple[str, ...]) -> Callable[..., object]:
    function: Callable[..., Any] = implementation.function
    taken = tuple(implementation.argnames)

    def call(**arguments: object) -> object:
        return function(*[arguments[name] for name in taken])

    call.__name__ = call.__qualname__ = f"{implementation.plugin_name}:{function.__name__}"
    call.__doc__ = f"Takes {', '.join(offered)} by keyword and passes on {', '.join(taken) or 'nothing'}."
    return call

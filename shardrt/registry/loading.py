"""Finding, importing, checking and registering plugins, each apart from the others' faults."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import attrs
import pluggy

from shardrt.errors import ConfigError, PluginError, PluginLoadError
from shardrt.registry import hookspecs
from shardrt.registry.checking import check_plugin
from shardrt.registry.collecting import collect_records, identity
from shardrt.registry.discovery import Origin, installed_plugins
from shardrt.registry.hookspecs import PROJECT
from shardrt.registry.nearness import did_you_mean, listed
from shardrt.registry.problems import PluginInfo, conflict
from shardrt.registry.records import Record
from shardrt.registry.registry import Registry
from shardrt.registry.tracing import trace_hook_calls

ALLOW_LIST = "SHARDRT_PLUGINS"
TRACE = "SHARDRT_TRACE_HOOKS"


def load_registry(plugins: Sequence[object] = (), *, environ: Mapping[str, str] | None = None) -> Registry:
    """Everything that installed plugins, and those handed over, offer. Imports neither torch nor vendor packages.

    A plugin that fails is set aside with its reason and raises only when it is asked for; one that was handed over
    raises at once. Two plugins that register the same thing always raise.

    Example:
        >>> import shardrt
        >>> registry = shardrt.load_registry()
        >>> registry.versions()["sync"] == f"shardrt {shardrt.__version__}"
        True
    """
    loader = _Loader(environ=os.environ if environ is None else environ)
    for origin in loader.select(installed_plugins()):
        loader.add_installed(origin)
    for plugin in plugins:
        loader.add_given(plugin)
    return loader.registry()


@attrs.define
class _Loader:
    environ: Mapping[str, str]
    traced: bool = attrs.field(init=False)
    manager: pluggy.PluginManager = attrs.field(init=False)
    infos: list[PluginInfo] = attrs.field(init=False, factory=list)
    given: list[object] = attrs.field(init=False, factory=list)
    _trial: pluggy.PluginManager | None = attrs.field(init=False, default=None)
    """An empty manager; None after a plugin that may have left something in it."""

    def __attrs_post_init__(self) -> None:
        self.traced = _switch(self.environ, TRACE)
        self.manager = self._new_manager()

    def select(self, installed: tuple[Origin, ...]) -> Iterable[Origin]:
        """Those that the allow-list has; the others are noted and never imported."""
        allow_list = self.environ.get(ALLOW_LIST, "")
        allowed = {name.strip() for name in allow_list.split(",")} - {""}
        known = {origin.name for origin in installed} | {origin.alias for origin in installed}
        unmatched = sorted(allowed - known)
        if unmatched:
            raise ConfigError(
                f"{ALLOW_LIST}={allow_list!r} names {unmatched[0]!r}, which no installed plugin is called; "
                f"installed: {listed(origin.name for origin in installed)}{did_you_mean(unmatched[0], known)}"
            )
        for origin in installed:
            if not allowed or not allowed.isdisjoint((origin.name, origin.alias)):
                yield origin
            else:
                problem = f"{origin} is installed but not in {ALLOW_LIST}={allow_list!r}; add {origin.name!r} to it"
                self.infos.append(PluginInfo.of(origin, "not allowed", problem=problem))

    def add_installed(self, origin: Origin) -> None:
        """Load a plugin; if that fails, note why and go on."""
        try:
            plugin = _imported(origin)
            records = self._admit(plugin, origin)
        except PluginError as error:
            self.infos.append(PluginInfo.of(origin, "failed", problem=str(error), error=error))
        else:
            self.infos.append(PluginInfo.of(origin, "ok", records=records))

    def add_given(self, plugin: object) -> None:
        """Register an object that the user handed over; any fault of it is the user's to see at once."""
        if any(plugin is other for other in self.given):
            raise ConfigError(f"the plugin {plugin!r} was handed over twice; hand it over once")
        self.given.append(plugin)
        if any(plugin is registered for _, registered in self.manager.list_name_plugin()):
            return
        base = name = str(getattr(plugin, "__name__", type(plugin).__name__))
        taken = {info.name for info in self.infos}
        count = 1
        while name in taken:
            count += 1
            name = f"{base}-{count}"
        origin = Origin(name=name)
        self.infos.append(PluginInfo.of(origin, "ok", records=self._admit(plugin, origin)))

    def registry(self) -> Registry:
        """All of it, once it is sure that no two plugins register the same thing."""
        in_use = [info.origin for info in self.infos if info.status == "ok"]
        owners: dict[tuple[str, ...], Origin] = {}
        for info in self.infos:
            for record in info.records:
                first = owners.setdefault(identity(record), info.origin)
                if first is not info.origin:
                    raise conflict(record, first, info.origin, in_use)
        return Registry(self.manager, tuple(self.infos), traced=self.traced)

    def _admit(self, plugin: object, origin: Origin) -> tuple[Record, ...]:
        # First in a manager apart: nothing of a plugin that fails half-way must stay behind in the one that is used.
        trial = self._trial or self._new_manager()
        self._trial = None
        try:
            implemented = check_plugin(plugin, origin)
            trial.register(plugin, name=origin.name)
            records = collect_records(trial, origin, implemented)
            trial.unregister(plugin)
            self.manager.register(plugin, name=origin.name)
        except PluginError:
            raise
        except Exception as error:
            raise PluginLoadError(
                f"{origin} could not be registered: {type(error).__name__}: {error}; {origin.remedy}"
            ) from error
        self._trial = trial
        return records

    def _new_manager(self) -> pluggy.PluginManager:
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(hookspecs)
        if self.traced:
            trace_hook_calls(manager)
        return manager


def _imported(origin: Origin) -> object:
    assert origin.entry_point is not None
    try:
        return origin.entry_point.load()
    # Some vendor packages end the process when a library of theirs is missing: that is a failed import, no more.
    except (Exception, SystemExit) as error:
        raise PluginLoadError(
            f"{origin} could not be imported: {type(error).__name__}: {error}; "
            f"install what it needs, or {origin.remedy}"
        ) from error


def _switch(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise ConfigError(f"{name}={environ[name]!r} is neither on nor off; set it to 1 or 0")

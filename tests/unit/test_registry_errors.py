"""Every fault of a plugin, with the whole text that the user reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import shardrt
from shardrt.errors import (
    ConfigError,
    HookSignatureError,
    HookVersionError,
    PluginConflictError,
    PluginError,
    PluginLoadError,
    RecordTypeError,
    UnknownPluginError,
)
from tests.unit.fake_site import FakeSite, make_site, offering

REMEDY = "upgrade it (pip install --upgrade shardrt-bad) or leave it out with SHARDRT_PLUGINS"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    yield from make_site(tmp_path, monkeypatch)


def three_backends(site: FakeSite) -> None:
    site.install("shardrt-gloo", {"gloo": offering("backend", "gloo")})
    site.install("shardrt-null", {"null": offering("backend", "null", device_type="'*'")})
    site.install("shardrt-reference", {"reference": offering("backend", "reference", device_type="'*'")})
    site.install("shardrt-nccl", {"nccl": offering("backend", "nccl", device_type="'cuda'")})


def test_unknown_backend(site: FakeSite) -> None:
    three_backends(site)
    with pytest.raises(UnknownPluginError) as caught:
        shardrt.load_registry().backends.get("cpu", "glo")
    assert str(caught.value) == (
        "unknown backend 'glo' for device type 'cpu'; installed: gloo, null, reference; did you mean 'gloo'?\n"
        "if it comes from a plugin, install its distribution, e.g. pip install shardrt-glo"
    )


def test_a_backend_of_another_device(site: FakeSite) -> None:
    three_backends(site)
    with pytest.raises(UnknownPluginError) as caught:
        shardrt.load_registry().backends.get("cpu", "nccl")
    assert str(caught.value) == (
        "unknown backend 'nccl' for device type 'cpu'; installed: gloo, null, reference\n"
        "'nccl' is for device type cuda: train there, or choose another"
    )


@pytest.mark.parametrize(
    ("collection", "kind"),
    [
        ("partitioners", "partitioner"),
        ("schedules", "schedule"),
        ("state_formats", "state format"),
        ("places", "place"),
        ("join_policies", "join policy"),
    ],
)
def test_unknown_name_of_each_kind(site: FakeSite, collection: str, kind: str) -> None:
    with pytest.raises(UnknownPluginError) as caught:
        getattr(shardrt.load_registry(), collection).get("No such")
    assert str(caught.value) == (
        f"unknown {kind} 'No such'; installed: none\nif it comes from a plugin, install its distribution"
    )


def test_unknown_name_tells_which_plugins_failed(site: FakeSite) -> None:
    site.install("shardrt-bad", {"bad": "import no_such_vendor"})
    site.install("shardrt-sync", {"sync": offering("schedule", "sync")})
    with pytest.raises(UnknownPluginError) as caught:
        shardrt.load_registry().schedules.get("overlap")
    assert str(caught.value) == (
        "unknown schedule 'overlap'; installed: sync\n"
        "if it comes from a plugin, install its distribution, e.g. pip install shardrt-overlap\n"
        "not in use: plugin 'bad' (shardrt-bad 1.0) could not be imported: ModuleNotFoundError: "
        f"No module named 'no_such_vendor'; install what it needs, or {REMEDY}"
    )


def test_unknown_name_tells_of_the_allow_list(site: FakeSite) -> None:
    site.install("shardrt-sync", {"sync": offering("schedule", "sync")})
    site.install("shardrt-late", {"late": offering("schedule", "late")})
    with pytest.raises(UnknownPluginError) as caught:
        shardrt.load_registry(environ={"SHARDRT_PLUGINS": "sync"}).schedules.get("late")
    assert str(caught.value) == (
        "unknown schedule 'late'; installed: sync\n"
        "plugin 'late' (shardrt-late 1.0) is installed but not in SHARDRT_PLUGINS='sync'; add 'late' to it"
    )


def test_allow_list_with_a_name_that_nothing_has(site: FakeSite) -> None:
    three_backends(site)
    with pytest.raises(ConfigError) as caught:
        shardrt.load_registry(environ={"SHARDRT_PLUGINS": "gloo,nul"})
    assert str(caught.value) == (
        "SHARDRT_PLUGINS='gloo,nul' names 'nul', which no installed plugin is called; "
        "installed: gloo, nccl, null, reference; did you mean 'null'?"
    )


def test_two_distributions_register_one_name(site: FakeSite) -> None:
    site.install("shardrt", {"gloo": offering("backend", "gloo")}, version="0.1.0")
    site.install("shardrt-fast", {"fast": offering("backend", "gloo")}, version="1.2")
    site.install("shardrt-sync", {"sync": offering("schedule", "sync")})
    with pytest.raises(PluginConflictError) as caught:
        shardrt.load_registry()
    assert str(caught.value) == (
        "two plugins register the backend 'gloo' for device type 'cpu': plugin 'fast' (shardrt-fast 1.2) and "
        "plugin 'gloo' (shardrt 0.1.0); which one would win is undefined: "
        "uninstall one of them (pip uninstall shardrt-fast), or "
        "set SHARDRT_PLUGINS to an allow-list without it (SHARDRT_PLUGINS='gloo,sync')"
    )
    assert len(shardrt.load_registry(environ={"SHARDRT_PLUGINS": "gloo,sync"}).backends) == 1


def test_two_plugins_of_one_distribution_register_one_name(site: FakeSite) -> None:
    site.install("shardrt-pair", {"a": offering("schedule", "x"), "b": offering("schedule", "x")})
    with pytest.raises(PluginConflictError) as caught:
        shardrt.load_registry()
    assert str(caught.value) == (
        "two plugins register the schedule 'x': plugin 'a' (shardrt-pair 1.0) and plugin 'b' (shardrt-pair 1.0); "
        "which one would win is undefined: set SHARDRT_PLUGINS to an allow-list without it (SHARDRT_PLUGINS='a')"
    )


class Mine:
    @shardrt.hookimpl
    def shardrt_schedules(self) -> Iterator[shardrt.ScheduleRecord]:
        yield shardrt.ScheduleRecord(name="x", summary="mine", factory=object)


def test_a_plugin_handed_over_registers_an_installed_name(site: FakeSite) -> None:
    site.install("shardrt-a", {"a": offering("schedule", "x")})
    site.install("shardrt-b", {"b": offering("schedule", "y")})
    with pytest.raises(PluginConflictError) as caught:
        shardrt.load_registry([Mine()])
    assert str(caught.value) == (
        "two plugins register the schedule 'x': plugin 'a' (shardrt-a 1.0) and plugin 'Mine' (in process); "
        "which one would win is undefined: rename the record of the one that was handed over, or "
        "set SHARDRT_PLUGINS to an allow-list without it (SHARDRT_PLUGINS='b')"
    )


def test_two_plugins_handed_over_register_one_name(site: FakeSite) -> None:
    with pytest.raises(PluginConflictError) as caught:
        shardrt.load_registry([Mine(), Mine()])
    assert str(caught.value) == (
        "two plugins register the schedule 'x': plugin 'Mine' (in process) and plugin 'Mine-2' (in process); "
        "which one would win is undefined: rename the record of the one that was handed over"
    )


FAULTS: dict[str, tuple[str, type[PluginError], str]] = {
    "missing vendor": (
        "import no_such_vendor",
        PluginLoadError,
        " could not be imported: ModuleNotFoundError: No module named 'no_such_vendor'; install what it needs, or ",
    ),
    "vendor ends the process": (
        "raise SystemExit('libhccl.so is missing')",
        PluginLoadError,
        " could not be imported: SystemExit: libhccl.so is missing; install what it needs, or ",
    ),
    "syntax": (
        "raise SyntaxError('odd')",
        PluginLoadError,
        " could not be imported: SyntaxError: odd; install what it needs, or ",
    ),
    "no hook": ("", HookSignatureError, " implements no hook; mark its functions with @shardrt.hookimpl, or "),
    "forgotten mark": (
        "def shardrt_backends():\n    return []",
        HookSignatureError,
        " has a function shardrt_backends that is not marked as a hook implementation and would never be called; "
        "decorate it with @shardrt.hookimpl, or ",
    ),
    "unknown argument": (
        "@shardrt.hookimpl\ndef shardrt_plan_built(plans, world): ...",
        HookSignatureError,
        " implements shardrt_plan_built(plans, world), but the hook has the arguments (runtime, plan): "
        "'plans', 'world' do not exist; did you mean 'plan'? take only arguments that exist, fewer are fine, or ",
    ),
    "argument of a hook without any": (
        "@shardrt.hookimpl\ndef shardrt_backends(device): ...",
        HookSignatureError,
        " implements shardrt_backends(device), but the hook has the arguments (): "
        "'device' does not exist; take only arguments that exist, fewer are fine, or ",
    ),
    "defaults are never filled": (
        "@shardrt.hookimpl\ndef shardrt_plan_built(runtime, plan=None, **more): ...",
        HookSignatureError,
        " implements shardrt_plan_built(runtime, plan=None, **more), but the hook has the arguments (runtime, plan): "
        "'plan', 'more' would never be filled; take plain arguments, without *, ** or a default, or ",
    ),
    "unknown hook": (
        "@shardrt.hookimpl\ndef shardrt_backend(): ...",
        HookSignatureError,
        " implements an unknown hook 'shardrt_backend'; hooks: shardrt_backends, shardrt_checkpoint_committed, "
        "shardrt_join_policies, shardrt_partitioners, shardrt_places, shardrt_plan_built, shardrt_rank_failed, "
        "shardrt_schedules, shardrt_state_formats, shardrt_step_finished; did you mean 'shardrt_backends'? "
        "rename it, mark it @shardrt.hookimpl(optionalhook=True) if it is of a newer version, or ",
    ),
    "wrapper": (
        "@shardrt.hookimpl(wrapper=True)\ndef shardrt_backends():\n    return (yield)",
        HookSignatureError,
        " wraps the hook 'shardrt_backends', but hooks are called for each plugin alone; "
        "implement it without wrapper=True, or ",
    ),
    "newer major": (
        "SHARDRT_HOOK_VERSION = '2.0'\n@shardrt.hookimpl\ndef shardrt_new(): ...",
        HookVersionError,
        " was made for hook version 2.0, and this shardrt speaks hook version 1.1; "
        "upgrade shardrt (pip install --upgrade shardrt), or install an older version of the plugin",
    ),
    "newer minor": (
        "SHARDRT_HOOK_VERSION = '1.7'",
        HookVersionError,
        " was made for hook version 1.7, and this shardrt speaks hook version 1.1; "
        "upgrade shardrt (pip install --upgrade shardrt), or install an older version of the plugin",
    ),
    "older major": (
        "SHARDRT_HOOK_VERSION = '0.9'",
        HookVersionError,
        " was made for hook version 0.9, and this shardrt speaks hook version 1.1; ",
    ),
    "malformed version": (
        "SHARDRT_HOOK_VERSION = 1.0",
        HookVersionError,
        " has SHARDRT_HOOK_VERSION = 1.0, which is no version; "
        'write it as text like "1.1", the version of the hooks it was made for, or ',
    ),
    "hook raises": (
        "@shardrt.hookimpl\ndef shardrt_backends():\n    raise KeyError('device')",
        PluginLoadError,
        ": hook shardrt_backends raised KeyError: 'device'; ",
    ),
    "invalid record": (
        "@shardrt.hookimpl\ndef shardrt_schedules():\n"
        "    yield shardrt.ScheduleRecord(name='Bad Name', summary='x', factory=object)",
        PluginLoadError,
        ": hook shardrt_schedules raised ValueError: name must be a word of lower-case letters, digits, '-' and '_' "
        "that starts with a letter, got 'Bad Name'; ",
    ),
    "returns None": (
        "@shardrt.hookimpl\ndef shardrt_backends(): ...",
        RecordTypeError,
        ": hook shardrt_backends returned None; yield BackendRecord objects, or ",
    ),
    "returns no iterable": (
        "@shardrt.hookimpl\ndef shardrt_backends():\n    return 7",
        RecordTypeError,
        ": hook shardrt_backends returned 7, which is not iterable; yield BackendRecord objects, or ",
    ),
    "record of another kind": (
        offering("schedule", "x").replace("shardrt_schedules", "shardrt_partitioners").replace("yield ", "yield 5; "),
        RecordTypeError,
        ": hook shardrt_partitioners yielded 5 of type int; yield PartitionerRecord objects, or ",
    ),
    "one record twice": (
        offering("schedule", "x") + offering("schedule", "x").replace("    yield", "    for _ in '12': yield"),
        PluginConflictError,
        " registers the schedule 'x' twice; yield it once, or ",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_plugin_is_set_aside_and_raises_when_asked_for(site: FakeSite, fault: str) -> None:
    source, kind, told = FAULTS[fault]
    observer = "@shardrt.hookimpl\ndef shardrt_rank_failed():\n    raise AssertionError('must not run')\n"
    site.install("shardrt-bad", {"bad": f"{observer if fault != 'no hook' else ''}{source}"})
    site.install("shardrt-good", {"good": offering("schedule", "good")})
    registry = shardrt.load_registry()
    text = f"plugin 'bad' (shardrt-bad 1.0){told}"
    if "older version of the plugin" not in told:
        text += REMEDY
    bad, good = registry.plugins
    assert (bad.name, bad.distribution, bad.version, bad.status, bad.problem, bad.records) == (
        "bad",
        "shardrt-bad",
        "1.0",
        "failed",
        text,
        (),
    )
    assert good.status == "ok"
    assert registry.schedules.get("good").name == "good"
    assert registry.versions() == {"good": "shardrt-good 1.0"}
    assert registry.lifecycle("shardrt_rank_failed") == ()
    assert registry.hook.shardrt_rank_failed(runtime=None, rank=0, error="") == []
    assert registry.hook.shardrt_backends() == []
    for ask in (
        lambda: registry.partitioners.get("bad"),
        lambda: registry.backends.get("cpu", "bad"),
        lambda: registry.schedules.get("bad"),
        lambda: registry.state_formats.get("bad"),
    ):
        with pytest.raises(kind) as caught:
            ask()
        assert type(caught.value) is kind
        assert str(caught.value) == text


def test_the_original_error_is_chained(site: FakeSite) -> None:
    site.install("shardrt-bad", {"bad": "import no_such_vendor"})
    registry = shardrt.load_registry()
    for _ in range(2):
        with pytest.raises(PluginLoadError) as caught:
            registry.backends.get("cpu", "bad")
        assert isinstance(caught.value.__cause__, ModuleNotFoundError)
        assert caught.value.__cause__.name == "no_such_vendor"


def test_hooks_of_another_version_are_never_called(site: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    source = (
        "SHARDRT_HOOK_VERSION = '2.0'\n@shardrt.hookimpl\ndef shardrt_backends():\n    print('called')\n    yield\n"
    )
    site.install("shardrt-bad", {"bad": source})
    assert shardrt.load_registry().plugins[0].status == "failed"
    assert capsys.readouterr().out == ""


def test_entry_points_may_name_an_object_whose_module_has_the_version(site: FakeSite) -> None:
    source = "class Plugin:\n    @shardrt.hookimpl\n    def shardrt_rank_failed(self): ...\nplugin = Plugin()\n"
    site.install("shardrt-bad", {"bad": f"SHARDRT_HOOK_VERSION = '3.1'\n{source}", "fine": source})
    points = site.folder / "shardrt_bad-1.0.dist-info" / "entry_points.txt"
    points.write_text(points.read_text().replace("_bad_bad", "_bad_bad:plugin").replace("_fine", "_fine:plugin"))
    assert [plugin.status for plugin in shardrt.load_registry().plugins] == ["failed", "ok"]


class WrongArgument:
    @shardrt.hookimpl
    def shardrt_step_finished(self, steps: int) -> None: ...


class UnknownHook:
    @shardrt.hookimpl
    def shardrt_step_finish(self) -> None: ...


class WrongRecord:
    @shardrt.hookimpl
    def shardrt_schedules(self) -> list[str]:
        return ["sync"]


class OtherVersion(Mine):
    SHARDRT_HOOK_VERSION = "2.0"


class Raising:
    @shardrt.hookimpl
    def shardrt_schedules(self) -> list[shardrt.ScheduleRecord]:
        raise OSError("no disk")


GIVEN_REMEDY = "correct the object handed over as plugin"


@pytest.mark.parametrize(
    ("plugin", "kind", "told"),
    [
        (
            WrongArgument(),
            HookSignatureError,
            "plugin 'WrongArgument' (in process) implements shardrt_step_finished(steps), but the hook has the "
            "arguments (runtime, step, seconds): 'steps' does not exist; did you mean 'step'? "
            f"take only arguments that exist, fewer are fine, or {GIVEN_REMEDY}",
        ),
        (
            UnknownHook(),
            HookSignatureError,
            "plugin 'UnknownHook' (in process) implements an unknown hook 'shardrt_step_finish'; hooks: "
            "shardrt_backends, shardrt_checkpoint_committed, shardrt_join_policies, shardrt_partitioners, "
            "shardrt_places, shardrt_plan_built, shardrt_rank_failed, shardrt_schedules, shardrt_state_formats, "
            "shardrt_step_finished; did you mean 'shardrt_step_finished'? rename it, mark it "
            f"@shardrt.hookimpl(optionalhook=True) if it is of a newer version, or {GIVEN_REMEDY}",
        ),
        (
            WrongRecord(),
            RecordTypeError,
            "plugin 'WrongRecord' (in process): hook shardrt_schedules yielded 'sync' of type str; "
            f"yield ScheduleRecord objects, or {GIVEN_REMEDY}",
        ),
        (
            OtherVersion(),
            HookVersionError,
            "plugin 'OtherVersion' (in process) was made for hook version 2.0, and this shardrt speaks hook version "
            "1.1; upgrade shardrt (pip install --upgrade shardrt), or install an older version of the plugin",
        ),
        (
            Raising(),
            PluginLoadError,
            f"plugin 'Raising' (in process): hook shardrt_schedules raised OSError: no disk; {GIVEN_REMEDY}",
        ),
        (
            Mine,
            HookSignatureError,
            "plugin 'Mine' (in process) is a class, whose methods could not be called: "
            "hand over or point the entry point to an instance, Mine(), or a module",
        ),
        (
            object(),
            HookSignatureError,
            "plugin 'object' (in process) implements no hook; mark its functions with @shardrt.hookimpl, "
            f"or {GIVEN_REMEDY}",
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_faults_of_a_plugin_handed_over_are_raised_at_once(
    site: FakeSite, plugin: object, kind: type[PluginError], told: str
) -> None:
    with pytest.raises(kind) as caught:
        shardrt.load_registry([plugin])
    assert type(caught.value) is kind
    assert str(caught.value) == told

"""Finding plugins, looking them up, and the compiled lifecycle calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import attrs
import pytest

import shardrt
from shardrt.errors import ConfigError
from shardrt.registry.probing import probe
from tests.unit.fake_site import FakeSite, make_site, offering


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    yield from make_site(tmp_path, monkeypatch)


class Watcher:
    """Takes fewer arguments than the hooks offer."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    @shardrt.hookimpl
    def shardrt_step_finished(self, step: int) -> None:
        self.seen.append(step)

    @shardrt.hookimpl
    def shardrt_checkpoint_committed(self, step: int, path: str) -> None:
        self.seen.append((path, step))

    @shardrt.hookimpl
    def shardrt_rank_failed(self) -> None:
        self.seen.append("failed")


def test_each_kind_is_found_and_knows_where_it_comes_from(site: FakeSite) -> None:
    kinds = (
        "partitioner",
        "backend",
        "schedule",
        "state_format",
        "place",
        "join_policy",
    )  # shardrt_places, shardrt_join_policies
    for kind in kinds:
        site.install(f"shardrt-{kind}", {f"a_{kind}": offering(kind, "mine")}, version="2.5")
    registry = shardrt.load_registry()
    found = {
        "partitioner": registry.partitioners.get("mine"),
        "backend": registry.backends.get("cpu", "mine"),
        "schedule": registry.schedules.get("mine"),
        "state_format": registry.state_formats.get("mine"),
        "place": registry.places.get("mine"),
        "join_policy": registry.join_policies.get("mine"),
    }
    assert {kind: record.summary for kind, record in found.items()} == {kind: f"the mine {kind}" for kind in kinds}
    (entry,) = registry.schedules
    assert (entry.record, entry.plugin, entry.distribution, entry.version) == (
        found["schedule"],
        "a_schedule",
        "shardrt-schedule",
        "2.5",
    )
    assert len(registry.backends) == 1
    assert registry.versions() == {f"a_{kind}": f"shardrt-{kind} 2.5" for kind in kinds}


def test_a_backend_for_any_device_is_the_second_choice(site: FakeSite) -> None:
    site.install("shardrt-any", {"any": offering("backend", "wire", device_type="'*'")})
    site.install("shardrt-cuda", {"cuda": offering("backend", "wire", device_type="'cuda'")})
    backends = shardrt.load_registry().backends
    assert backends.get("cuda", "wire").device_type == "cuda"
    assert backends.get("cpu", "wire").device_type == "*"


def test_two_vendors_may_share_a_name_and_an_entry_point(site: FakeSite) -> None:
    site.install("shardrt-ascend", {"hccl": offering("backend", "hccl", device_type="'npu'")})
    site.install("shardrt-habana", {"hccl": offering("backend", "hccl", device_type="'hpu'")})
    registry = shardrt.load_registry()
    assert [(entry.record.device_type, entry.distribution) for entry in registry.backends] == [
        ("hpu", "shardrt-habana"),
        ("npu", "shardrt-ascend"),
    ]
    assert list(registry.versions()) == ["hccl@shardrt-ascend", "hccl@shardrt-habana"]
    only = shardrt.load_registry(environ={"SHARDRT_PLUGINS": "hccl@shardrt-habana"})
    assert [entry.record.device_type for entry in only.backends] == ["hpu"]
    both = shardrt.load_registry(environ={"SHARDRT_PLUGINS": "hccl"})
    assert len(both.backends) == 2


def test_a_distribution_on_the_path_twice_counts_once_and_the_first_wins(site: FakeSite) -> None:
    later = site.folder / "later"
    site.install("shardrt-foo", {"foo": offering("schedule", "foo")}, version="2.0")
    site.install("Shardrt_Foo", {"foo": offering("schedule", "foo")}, version="1.0", folder=later)
    site.path.append(str(later))
    assert shardrt.load_registry().versions() == {"foo": "shardrt-foo 2.0"}


def test_the_allow_list_keeps_others_from_being_imported(site: FakeSite) -> None:
    site.install("shardrt-a", {"a": offering("schedule", "a")})
    site.install("shardrt-b", {"b": "raise RuntimeError('must not be imported')"})
    registry = shardrt.load_registry(environ={"SHARDRT_PLUGINS": " a, "})
    assert [(plugin.name, plugin.status) for plugin in registry.plugins] == [("a", "ok"), ("b", "not allowed")]
    assert "shardrt_b_b" not in sys.modules
    assert registry.versions() == {"a": "shardrt-a 1.0"}


def test_an_empty_allow_list_is_none(site: FakeSite) -> None:
    site.install("shardrt-a", {"a": offering("schedule", "a")})
    assert len(shardrt.load_registry(environ={"SHARDRT_PLUGINS": ""}).schedules) == 1


def test_the_allow_list_does_not_concern_plugins_handed_over(site: FakeSite) -> None:
    site.install("shardrt-a", {"a": offering("schedule", "a")})
    registry = shardrt.load_registry([Watcher()], environ={"SHARDRT_PLUGINS": "a"})
    assert [plugin.name for plugin in registry.plugins] == ["a", "Watcher"]


def test_modules_and_instances_are_handed_over(site: FakeSite) -> None:
    module = ModuleType("my_plugin")
    exec(f"import shardrt\n{offering('schedule', 'mine')}", vars(module))
    registry = shardrt.load_registry([module, Watcher(), Watcher()])
    assert [(plugin.name, plugin.distribution) for plugin in registry.plugins] == [
        ("my_plugin", "in process"),
        ("Watcher", "in process"),
        ("Watcher-2", "in process"),
    ]
    assert registry.versions() == {"my_plugin": "in process"}, "observers may differ between ranks"


def test_an_installed_module_handed_over_as_well_is_the_same_plugin(site: FakeSite) -> None:
    site.install("shardrt-a", {"a": offering("schedule", "a")})
    shardrt.load_registry()
    registry = shardrt.load_registry([sys.modules["shardrt_a_a"]])
    assert [plugin.name for plugin in registry.plugins] == ["a"]


def test_one_object_twice_is_refused(site: FakeSite) -> None:
    watcher = Watcher()
    with pytest.raises(ConfigError, match=r"was handed over twice; hand it over once$"):
        shardrt.load_registry([watcher, watcher])


def test_plugins_need_not_be_hashable(site: FakeSite) -> None:
    @attrs.define
    class Unhashable:
        count: int = 0

        @shardrt.hookimpl
        def shardrt_rank_failed(self, rank: int) -> None:
            self.count += rank

    plugin = Unhashable()
    (call,) = shardrt.load_registry([plugin]).lifecycle("shardrt_rank_failed")
    call(runtime=None, rank=3, error="")
    assert plugin.count == 3


def test_lifecycle_calls_are_plain_and_pass_what_each_implementation_takes(site: FakeSite) -> None:
    watcher = Watcher()
    registry = shardrt.load_registry([watcher])
    assert registry.lifecycle("shardrt_plan_built") == ()
    for call in registry.lifecycle("shardrt_step_finished"):
        call(runtime=None, step=7, seconds=0.5)
    for call in registry.lifecycle("shardrt_checkpoint_committed"):
        call(runtime=None, path="ckpt", step=8)
    for call in registry.lifecycle("shardrt_rank_failed"):
        call(runtime=None, rank=1, error="lost")
    assert watcher.seen == [7, ("ckpt", 8), "failed"]
    registry.hook.shardrt_step_finished(runtime=None, step=9, seconds=0.5)
    assert watcher.seen[-1] == 9


def test_lifecycle_order_is_the_order_of_the_hook(site: FakeSite) -> None:
    order: list[str] = []

    def observer(name: str, **options: bool) -> object:
        class Observer:
            @shardrt.hookimpl(**options)
            def shardrt_step_finished(self) -> None:
                order.append(name)

        return Observer()

    registry = shardrt.load_registry(
        [observer("first", tryfirst=True), observer("a"), observer("b"), observer("last", trylast=True)]
    )
    for call in registry.lifecycle("shardrt_step_finished"):
        call(runtime=None, step=1, seconds=0.0)
    compiled = order.copy()
    order.clear()
    registry.hook.shardrt_step_finished(runtime=None, step=1, seconds=0.0)
    assert compiled == order == ["first", "b", "a", "last"]


def test_static_methods_and_renamed_functions_are_hooks_too(site: FakeSite) -> None:
    class Plugin:
        @staticmethod
        @shardrt.hookimpl(specname="shardrt_step_finished")
        def counted(seconds: float) -> float:
            return seconds * 2

    (call,) = shardrt.load_registry([Plugin()]).lifecycle("shardrt_step_finished")
    assert call(runtime=None, step=1, seconds=4.0) == 8.0


def test_a_function_made_elsewhere_is_a_hook_by_the_name_it_is_given(site: FakeSite) -> None:
    def made_elsewhere(step: int) -> int:
        return step + 1

    plugin = ModuleType("made")
    plugin.shardrt_step_finished = shardrt.hookimpl(made_elsewhere)  # type: ignore[attr-defined]
    (call,) = shardrt.load_registry([plugin]).lifecycle("shardrt_step_finished")
    assert call(runtime=None, step=1, seconds=4.0) == 2


def test_a_hook_of_a_newer_version_may_be_optional(site: FakeSite) -> None:
    class Plugin(Watcher):
        @shardrt.hookimpl(optionalhook=True)
        def shardrt_moon_landed(self, crater: str) -> None: ...

    assert shardrt.load_registry([Plugin()]).plugins[0].status == "ok"


def test_tracing_prints_one_line_for_each_call(site: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("shardrt-a", {"a": offering("backend", "wire")})
    site.install("shardrt-b", {"b": "@shardrt.hookimpl\ndef shardrt_schedules():\n    yield 1 / 0\n"})
    watcher = Watcher()
    registry = shardrt.load_registry([watcher], environ={"SHARDRT_TRACE_HOOKS": "1"})
    for call in registry.lifecycle("shardrt_step_finished"):
        call(runtime=None, step=7, seconds=0.5)
    assert registry.lifecycle("shardrt_plan_built") == ()
    registry.hook.shardrt_plan_built(runtime="r" * 500, plan=None)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "shardrt hook shardrt_backends() plugins: a -> [[BackendRecord cpu/wire]]",
        "shardrt hook shardrt_schedules() plugins: b -> raised ZeroDivisionError: division by zero",
        "shardrt hook shardrt_step_finished(runtime=None, step=7, seconds=0.5) plugins: Watcher -> []",
        f"shardrt hook shardrt_plan_built(runtime='{'r' * 156}..., plan=None) plugins: none -> []",
    ]
    assert watcher.seen == [7]


def test_tracing_survives_what_cannot_be_printed(site: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    class Shy:
        def __repr__(self) -> str:
            raise ValueError("no")

    registry = shardrt.load_registry([Watcher()], environ={"SHARDRT_TRACE_HOOKS": "on"})
    registry.hook.shardrt_step_finished(runtime=Shy(), step=1, seconds=0)
    assert "runtime=<Shy whose repr raised ValueError>" in capsys.readouterr().err


def test_tracing_is_off_unless_asked_for(site: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    shardrt.load_registry([Watcher()], environ={"SHARDRT_TRACE_HOOKS": "0"})
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match=r"^SHARDRT_TRACE_HOOKS='maybe' is neither on nor off; set it to 1 or 0$"):
        shardrt.load_registry(environ={"SHARDRT_TRACE_HOOKS": "maybe"})


def test_probing_never_raises() -> None:
    def record(probe: object, **fields: object) -> shardrt.BackendRecord:
        return shardrt.BackendRecord(name="x", summary="x", factory=object, probe=probe, **fields)  # type: ignore[arg-type]

    def leave() -> shardrt.Availability:
        raise SystemExit("libfoo is missing")

    assert probe(record(shardrt.Availability.yes)).ok
    assert probe(record(leave)).reason == "its probe raised SystemExit: libfoo is missing"
    assert probe(record(lambda: True)).reason == "its probe returned True instead of an Availability"
    assert probe(record(leave, needs=("no-such-a", "pytest", "no-such-b"))) == shardrt.Availability.no(
        "no-such-a, no-such-b are not installed", fix="pip install no-such-a no-such-b"
    )

"""Every hook is versioned, documented as it is, shown by an example that runs, tested, and called in a known order."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

import shardrt
from shardrt.registry import hookspecs
from shardrt.registry.checking import HOOK_ARGUMENTS
from shardrt.registry.collecting import RECORD_TYPES
from shardrt.registry.records import Record

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs" / "hooks.md"
HOOKS = {name: function for name, function in vars(hookspecs).items() if hasattr(function, "shardrt_spec")}


def section(title: str) -> str:
    """The text under a heading of the third level, or nothing."""
    found = re.search(rf"^### `{title}`\n(.*?)(?=^##|\Z)", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def test_hooks_are_found() -> None:
    assert len(HOOKS) >= 8
    assert set(HOOKS) == set(HOOK_ARGUMENTS)
    assert all(name.startswith("shardrt_") for name in HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_the_docstring_says_since_when(name: str) -> None:
    found = re.search(r"\bSince (\d+)\.(\d+)\.", inspect.getdoc(HOOKS[name]) or "")
    assert found, f"the docstring of {name} needs 'Since <major>.<minor>.'"
    assert (int(found[1]), int(found[2])) <= shardrt.HOOK_VERSION
    assert f"Since {found[1]}.{found[2]}." in section(name).replace("\n", " ")


@pytest.mark.parametrize("name", HOOKS)
def test_the_docstring_has_an_example_that_implements_the_hook(name: str) -> None:
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(HOOKS[name]) or "")
    assert any(f"def {name}(" in example.source for example in examples), f"{name} needs a doctest example"


@pytest.mark.parametrize("name", HOOKS)
def test_types_are_complete(name: str) -> None:
    signature = inspect.signature(HOOKS[name])
    assert signature.return_annotation is not signature.empty
    assert all(parameter.annotation is not parameter.empty for parameter in signature.parameters.values())


@pytest.mark.parametrize("name", HOOKS)
def test_the_documented_signature_is_the_real_one(name: str) -> None:
    signature = str(inspect.signature(HOOKS[name])).replace("'", "")
    text = section(name)
    assert f"```python\ndef {name}{signature}\n```" in text, f"docs/hooks.md needs a section `{name}` with {signature}"
    documented = re.findall(r"^- `(\w+)`: ", text, re.MULTILINE)
    assert documented == list(HOOK_ARGUMENTS[name])
    assert f"def {name}(self" in text, f"the section of {name} needs an example"


def test_no_section_is_about_a_hook_that_is_gone() -> None:
    documented = re.findall(r"^### `(shardrt_\w+)`", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert documented == list(HOOKS), "the same hooks, in the order of the specifications"


def test_the_examples_of_the_page_run() -> None:
    result = doctest.testfile(str(DOCS), module_relative=False, encoding="utf-8")
    assert result.attempted >= 3 * len(HOOKS)
    assert result.failed == 0


@pytest.mark.parametrize("record", RECORD_TYPES.values(), ids=lambda record: record.__name__)
def test_every_field_of_a_record_is_documented(record: type[Record]) -> None:
    assert section(record.__name__)
    page = DOCS.read_text(encoding="utf-8")
    for field in attrs.fields(record):
        assert f"| `{field.name}` |" in page, f"docs/hooks.md does not explain {record.__name__}.{field.name}"


@pytest.mark.parametrize("switch", ["SHARDRT_PLUGINS", "SHARDRT_TRACE_HOOKS"])
def test_switches_are_documented(switch: str) -> None:
    assert f"| `{switch}=" in DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", HOOKS)
def test_some_test_is_about_the_hook(name: str) -> None:
    about = [
        path
        for path in TESTS.rglob("test_*.py")
        if path != Path(__file__) and re.search(rf"\b{name}\b", path.read_text(encoding="utf-8"))
    ]
    assert about, f"no test under tests/ mentions {name}"


def test_the_diagram_shows_every_hook() -> None:
    diagram = re.search(r"```mermaid\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert diagram
    assert [name for name in HOOKS if f'"{name}"' not in diagram[1]] == []


class Recorder:
    """Implements every hook by noting its name."""

    def __init__(self) -> None:
        self.calls: list[str] = []


def _noting(name: str) -> Callable[[Recorder], Any]:
    def implementation(self: Recorder) -> tuple[()]:
        self.calls.append(name)
        return ()

    implementation.__name__ = name
    implementation.__qualname__ = f"Recorder.{name}"
    return shardrt.hookimpl(implementation)


for _name in HOOKS:
    setattr(Recorder, _name, _noting(_name))


def test_registration_hooks_are_called_once_in_the_order_of_the_specifications() -> None:
    recorder = Recorder()
    shardrt.load_registry([recorder])
    assert recorder.calls == [name for name in HOOKS if name in RECORD_TYPES]
    assert recorder.calls == [
        "shardrt_partitioners",
        "shardrt_backends",
        "shardrt_schedules",
        "shardrt_state_formats",
        "shardrt_places",
        "shardrt_join_policies",
    ]


def test_a_runtime_calls_hooks_in_the_order_of_the_diagram() -> None:
    import torch

    recorder = Recorder()
    with shardrt.Runtime(plugins=[recorder]) as runtime:
        assert recorder.calls == list(RECORD_TYPES)
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = runtime.optimizer([weight], torch.optim.SGD, lr=0.1)
        for _ in range(2):
            weight.sum().backward()
            optimizer.step()
    assert recorder.calls == [
        *RECORD_TYPES,
        "shardrt_plan_built",
        "shardrt_step_finished",
        "shardrt_step_finished",
    ]

"""Configuration: where it is read from, and what is refused with which words."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from shardrt.config import Choice, RuntimeConfig
from shardrt.errors import ConfigError

KNOWN = "backend, bucket_mb, device, hang_reports, partitioner, place, schedule, state_format, timeline, timeout"


def test_defaults() -> None:
    config = RuntimeConfig()
    assert config == RuntimeConfig.from_mapping({})
    assert (config.partitioner, config.backend, config.schedule) == (
        Choice(name="greedy"),
        Choice(name="auto"),
        Choice(name="sync"),
    )
    assert (config.device, config.bucket_mb, config.timeout) == (None, None, 300.0)


def test_names_mappings_and_choices_are_the_same() -> None:
    options = {"name": "greedy", "cost": "bytes", "weights": [1, 2.5], "deep": {"on": True, "off": None}}
    config = RuntimeConfig(partitioner=options, backend="gloo", schedule=Choice(name="sync"))
    assert config.partitioner.name == "greedy"
    assert dict(config.partitioner.options) == {"cost": "bytes", "weights": (1, 2.5), "deep": {"on": True, "off": None}}
    assert config == RuntimeConfig.from_mapping({"partitioner": options, "backend": {"name": "gloo"}})


def test_it_is_frozen_through_and_through() -> None:
    options: dict[str, Any] = {"name": "greedy", "deep": {"list": [1]}}
    config = RuntimeConfig(partitioner=options)
    options["deep"]["list"].append(2)
    assert config.partitioner.options["deep"]["list"] == (1,)
    with pytest.raises(TypeError):
        config.partitioner.options["cost"] = "bytes"  # type: ignore[index]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.timeout = 3.0  # type: ignore[misc]
    assert hash(config) == hash(RuntimeConfig(partitioner=options | {"deep": {"list": [1]}}))


def test_json_goes_there_and_back() -> None:
    config = RuntimeConfig(
        partitioner={"name": "greedy", "weights": [1, [2]], "deep": {"a": None}}, bucket_mb=25, device="cuda:0"
    )
    text = json.dumps(config.to_json())
    assert RuntimeConfig.from_mapping(json.loads(text)) == config
    assert json.loads(text) == {
        "partitioner": {"name": "greedy", "weights": [1, [2]], "deep": {"a": None}},
        "backend": {"name": "auto"},
        "schedule": {"name": "sync"},
        "state_format": {"name": "safetensors"},
        "place": {"name": "files"},
        "device": "cuda:0",
        "bucket_mb": 25.0,
        "timeout": 300.0,
        "timeline": None,
        "hang_reports": None,
    }


def test_whole_numbers_are_the_same_text_on_all_ranks() -> None:
    whole, fraction = RuntimeConfig(timeout=60, bucket_mb=25), RuntimeConfig(timeout=60.0, bucket_mb=25.0)
    assert json.dumps(whole.to_json()) == json.dumps(fraction.to_json())
    assert list(whole.to_json()) == [field.name for field in attrs.fields(RuntimeConfig)], "no field is forgotten"


def test_a_directory_may_be_a_path() -> None:
    assert RuntimeConfig(timeline=Path("runs/today")) == RuntimeConfig.from_mapping({"timeline": "runs/today"})


BODY = 'timeout = 60\nbackend = "gloo"\n[{prefix}partitioner]\nname = "greedy"\ncost = "bytes"\n'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.toml", BODY.format(prefix="")),
        ("train.toml", "[shardrt]\n" + BODY.format(prefix="shardrt.")),
        ("train.toml", "lr = 0.1\n[shardrt]\n" + BODY.format(prefix="shardrt.") + "[model]\nwidth = 3\n"),
        ("pyproject.toml", "[project]\nname='x'\n[tool.shardrt]\n" + BODY.format(prefix="tool.shardrt.")),
        ("other.toml", "[tool.other]\na = 1\n[tool.shardrt]\n" + BODY.format(prefix="tool.shardrt.")),
    ],
    ids=["top level", "table", "table among others", "pyproject", "tool table"],
)
def test_toml(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    expected = RuntimeConfig(partitioner={"name": "greedy", "cost": "bytes"}, backend="gloo", timeout=60)
    assert RuntimeConfig.from_toml(path) == RuntimeConfig.from_toml(str(path)) == expected


@pytest.mark.parametrize(
    ("mapping", "told"),
    [
        (
            {"partitoner": "greedy"},
            f"unknown key 'partitoner' in the configuration; known: {KNOWN}; did you mean 'partitioner'?",
        ),
        ({"lr": 1}, f"unknown key 'lr' in the configuration; known: {KNOWN}"),
        ({3: 1}, f"unknown key 3 in the configuration; known: {KNOWN}"),
        ([("timeout", 3)], f"the configuration is [('timeout', 3)]; it must be a mapping of keys: {KNOWN}"),
        ({"timeout": -1}, "timeout = -1 is not possible; give a number of seconds above 0"),
        ({"timeout": True}, "timeout = True is not possible; give a number of seconds above 0"),
        ({"timeout": None}, "timeout = None is not possible; give a number of seconds above 0"),
        ({"timeout": "5"}, "timeout = '5' is not possible; give a number of seconds above 0"),
        ({"timeout": float("inf")}, "timeout = inf is not possible; give a number of seconds above 0"),
        ({"timeout": float("nan")}, "timeout = nan is not possible; give a number of seconds above 0"),
        ({"timeout": 10**400}, f"timeout = {10**400} is not possible; give a number of seconds above 0"),
        ({"bucket_mb": 0}, "bucket_mb = 0 is not possible; give a number of megabytes above 0, or leave it out"),
        (
            {"bucket_mb": False},
            "bucket_mb = False is not possible; give a number of megabytes above 0, or leave it out",
        ),
        (
            {"device": 0},
            "device = 0 is not a device; give one as text, like 'cpu' or 'cuda:0', or leave it out",
        ),
        (
            {"device": " "},
            "device = ' ' is not a device; give one as text, like 'cpu' or 'cuda:0', or leave it out",
        ),
        ({"timeline": 3}, "timeline = 3 is not a directory; give its path as text, or leave it out"),
        ({"timeline": " "}, "timeline = ' ' is not a directory; give its path as text, or leave it out"),
        (
            {"backend": 3},
            "backend = 3 is not a plugin's name; give a name, or a mapping with a name and options "
            "(`shardrt plugins` lists the names)",
        ),
        (
            {"backend": {"name": ""}},
            "backend.name = '' is not a plugin's name; give a name, or a mapping with a name and options "
            "(`shardrt plugins` lists the names)",
        ),
        (
            {"partitioner": {"cost": "bytes"}},
            "partitioner = {'cost': 'bytes'} has no 'name'; give the plugin's name beside its options, "
            "as in {'name': 'greedy', ...}",
        ),
        (
            {"schedule": {"name": "sync", "when": {"day": datetime.date(2026, 1, 2)}}},
            "schedule.when.day = datetime.date(2026, 1, 2) of type date cannot be an option; "
            "options are text, finite numbers, true, false, lists and tables of these",
        ),
        (
            {"schedule": {"name": "sync", "x": float("nan")}},
            "schedule.x = nan of type float cannot be an option; "
            "options are text, finite numbers, true, false, lists and tables of these",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_meant(mapping: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig.from_mapping(mapping)
    assert str(caught.value) == told


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.toml", "tiemout = 3", f"unknown key 'tiemout' in '{{path}}'; known: {KNOWN}; did you mean 'timeout'?"),
        ("a.toml", "[shardrt]\nx = 3", f"unknown key 'x' in [shardrt] of '{{path}}'; known: {KNOWN}"),
        ("a.toml", "[tool.shardrt]\nx = 3", f"unknown key 'x' in [tool.shardrt] of '{{path}}'; known: {KNOWN}"),
        ("a.toml", "shardrt = 3", f"[shardrt] of '{{path}}' is 3; it must be a mapping of keys: {KNOWN}"),
        ("a.toml", "[shardrt]\n[tool.shardrt]", "'{path}' has both [shardrt] and [tool.shardrt]; keep one"),
        ("pyproject.toml", "[project]\nname = 'x'", "'{path}' has no table [tool.shardrt]; add one"),
        (
            "a.toml",
            "timeout = 3\nbackend = = 2",
            "configuration file '{path}' is not valid TOML: Invalid value (at line 2, column 11); correct it there",
        ),
        ("missing.toml", None, "configuration file '{path}' does not exist; check its path"),
    ],
    ids=str,
)
def test_files_that_cannot_be_meant(tmp_path: Path, name: str, text: str | None, told: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig.from_toml(path)
    assert str(caught.value) == told.format(path=path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^configuration file '.*' cannot be read: .*; check it$"):
        RuntimeConfig.from_toml(tmp_path)
    path = tmp_path / "latin.toml"
    path.write_bytes(b'device = "\xe9"')
    with pytest.raises(ConfigError, match=r"cannot be read: 'utf-8' codec can't decode"):
        RuntimeConfig.from_toml(path)

"""``shardrt`` itself and ``shardrt plugins``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import shardrt
from shardrt.cli import COMMANDS, main
from tests.unit.fake_site import FakeSite, make_site, offering


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    yield from make_site(tmp_path, monkeypatch)


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, list(arguments), catch_exceptions=False)


def sample(site: FakeSite) -> None:
    unavailable = "lambda: shardrt.Availability.no('no device found', fix='plug one in')"
    site.install("shardrt-wire", {"wire": offering("backend", "wire")}, version="3.1")
    site.install("shardrt-air", {"air": offering("backend", "air", probe=unavailable, device_type="'npu'")})
    site.install("shardrt-odd", {"odd": offering("backend", "odd", probe="lambda: [][1]")})
    site.install("shardrt-sync", {"sync": "print('hello')\n" + offering("schedule", "sync", needs="('no-such-dist',)")})
    site.install("shardrt-bad", {"bad": "import no_such_vendor"})


def test_json_is_one_document_and_nothing_else(site: FakeSite) -> None:
    sample(site)
    result = run("plugins", "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["shardrt"] == shardrt.__version__
    assert document["hook_version"] == "1.1"
    assert document["partitioners"] == document["state_formats"] == []
    assert [(one["name"], one["device_type"], one["available"], one["reason"]) for one in document["backends"]] == [
        ("odd", "cpu", False, "its probe raised IndexError: list index out of range"),
        ("wire", "cpu", True, ""),
        ("air", "npu", False, "no device found"),
    ]
    assert document["schedules"] == [
        {
            "name": "sync",
            "summary": "the sync schedule",
            "needs": ["no-such-dist"],
            "available": False,
            "reason": "no-such-dist is not installed",
            "fix": "pip install no-such-dist",
            "plugin": "sync",
            "distribution": "shardrt-sync",
            "version": "1.0",
        }
    ]
    plugins = {plugin["name"]: plugin for plugin in document["plugins"]}
    assert plugins["wire"]["status"] == "ok"
    assert plugins["wire"]["records"] == ["cpu/wire"]
    assert plugins["bad"]["status"] == "failed"
    assert "No module named 'no_such_vendor'" in plugins["bad"]["problem"]


def test_tables_show_everything(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    sample(site)
    monkeypatch.setenv("SHARDRT_PLUGINS", "air,wire,bad,sync")
    result = run("plugins")
    assert result.exit_code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    assert rows == [
        ["wire", "cpu", "the wire backend", "yes", "shardrt-wire 3.1"],
        ["air", "npu", "the air backend", "no: no device found (plug one in)", "shardrt-air 1.0"],
        [
            "sync",
            "the sync schedule",
            "no: no-such-dist is not installed (pip install no-such-dist)",
            "shardrt-sync 1.0",
        ],
    ]
    lines = result.stdout.splitlines()
    assert "partitioners: none installed" in lines
    assert "state formats: none installed" in lines
    idle = lines[lines.index("plugins not in use") + 1 :]
    assert idle[0].startswith("failed: plugin 'bad' (shardrt-bad 1.0) could not be imported: ModuleNotFoundError")
    assert idle[1] == (
        "not allowed: plugin 'odd' (shardrt-odd 1.0) is installed but not in SHARDRT_PLUGINS='air,wire,bad,sync'; "
        "add 'odd' to it"
    )


def test_square_brackets_are_no_markup(site: FakeSite) -> None:
    site.install("shardrt-a", {"a": offering("schedule", "a").replace("the a schedule", "takes [bold] steps")})
    assert "takes [bold] steps" in run("plugins").stdout


def test_a_conflict_is_one_message_and_exit_code_1(site: FakeSite) -> None:
    site.install("shardrt-a", {"a": offering("schedule", "x")})
    site.install("shardrt-b", {"b": offering("schedule", "x")})
    told = (
        "two plugins register the schedule 'x': plugin 'a' (shardrt-a 1.0) and plugin 'b' (shardrt-b 1.0); which one "
        "would win is undefined: uninstall one of them (pip uninstall shardrt-b), or set SHARDRT_PLUGINS to an "
        "allow-list without it (SHARDRT_PLUGINS='a')"
    )
    result = run("plugins")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"error: {told}\n")
    result = run("plugins", "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    assert json.loads(result.stdout) == {"error": told, "type": "PluginConflictError"}


def test_version_and_help_import_no_command() -> None:
    assert run("--version").stdout == f"shardrt, version {shardrt.__version__}\n"
    told = run("--help").stdout
    assert all(f"  {name}" in told and summary in told for name, (_, summary) in COMMANDS.items())


def test_an_unknown_command_names_the_nearest() -> None:
    result = run("plugin")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        f"Error: no command 'plugin'; commands: {', '.join(COMMANDS)}; did you mean 'plugins'?"
    )


SCRIPT = """
import json, sys
from shardrt.cli import main
main(["plugins", "--json"], standalone_mode=False)
heavy = [name for name in ("torch", "torch_npu", "habana_frameworks", "numpy") if name in sys.modules]
print(json.dumps(heavy), file=sys.stderr)
"""


def test_listing_imports_neither_torch_nor_vendor_packages(tmp_path: Path) -> None:
    """Vendor packages that look installed, and would end the process, are left alone by the real built-ins."""
    for vendor in ("torch_npu", "habana_frameworks"):
        (tmp_path / vendor).mkdir()
        (tmp_path / vendor / "__init__.py").write_text("raise SystemExit('a vendor package was imported')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {key: value for key, value in os.environ.items() if not key.startswith("SHARDRT_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {plugin["name"]: plugin["problem"] for plugin in document["plugins"] if plugin["status"] != "ok"} == {}
    assert {"greedy", "flat", "bucket"} <= {one["name"] for one in document["partitioners"]}
    assert json.loads(done.stderr.splitlines()[-1]) == []

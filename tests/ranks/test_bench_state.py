"""``shardrt bench state`` as users run it: every way yields its figures, and nothing that was written stays."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from shardrt.bench.state import BEHIND, DURABLE, RATIOS, WAYS, StateReport, StateSettings, combine, measure_state
from shardrt.cli.state import show_state
from shardrt.errors import ConfigError
from tests.ranks.commands import answer_of

ROUNDS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def document(folder: Path) -> dict[str, Any]:
    # In the ranks too: importing torch's ZeRO warns, and only that may be silenced.
    strict = {"PYTHONWARNINGS": "error::DeprecationWarning"}
    arguments = ("--ranks", "2", "--state-gb", "0.002", "--rounds", str(ROUNDS), "--dir", str(folder))
    return answer_of("bench", "state", *arguments, environment=strict)


@pytest.fixture(scope="module")
def rows(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in document["ways"]}


@pytest.mark.long
def test_the_document_says_what_was_measured(document: dict[str, Any]) -> None:
    assert [row["name"] for row in document["ways"]] == list(WAYS)
    assert (document["ranks"], document["rounds"], document["state_gb"]) == (2, ROUNDS, 0.002)
    assert document["state_bytes"] == pytest.approx(0.002e9, rel=0.1)
    assert document["state_bytes"] == pytest.approx(8 * document["parameters"], rel=0.01)


@pytest.mark.long
def test_every_way_writes_all_the_state(rows: dict[str, dict[str, Any]], document: dict[str, Any]) -> None:
    for name, row in rows.items():
        assert document["state_bytes"] <= row["file_bytes"] <= 1.5 * document["state_bytes"], name
        assert len(row["seconds_by_round"]) == ROUNDS
        assert row["seconds"] == statistics.median(row["seconds_by_round"])
        assert all(seconds > 0 for seconds in row["seconds_by_round"])
        assert 0 <= row["peak_bytes_mean"] <= row["peak_bytes_largest"]
        assert row["durable"] == (name in DURABLE)


@pytest.mark.long
def test_an_asynchronous_save_tells_what_training_lost(rows: dict[str, dict[str, Any]]) -> None:
    behind = rows[BEHIND]
    assert 0 < behind["call_seconds"] <= behind["committed_seconds"]
    assert behind["seconds"] >= min(behind["call_seconds"], *behind["seconds_by_round"])
    assert behind["first_call_seconds"] > 0 and behind["step_seconds"] > 0 and behind["steps_meanwhile"] >= 0


@pytest.mark.long
def test_ratios_are_medians_of_the_rounds(rows: dict[str, dict[str, Any]], document: dict[str, Any]) -> None:
    for ours, theirs in RATIOS:
        pairs = zip(rows[ours]["seconds_by_round"], rows[theirs]["seconds_by_round"], strict=True)
        expected = statistics.median(mine / other for mine, other in pairs)
        assert document["time_ratios"][f"{ours}/{theirs}"] == pytest.approx(expected)


@pytest.mark.long
def test_what_was_written_is_removed(document: dict[str, Any], folder: Path) -> None:
    assert document["directory"] == str(folder)
    assert list(folder.iterdir()) == []


def test_the_tables_fit_and_say_what_is_synchronised(monkeypatch: pytest.MonkeyPatch) -> None:
    about = (
        "first_call_seconds",
        "call_seconds",
        "committed_seconds",
        "steps_meanwhile",
        "step_seconds",
        "slower_seconds",
    )
    more = dict.fromkeys(about, 1.5)
    run = {"seconds": 123.456, "peak": 12_345_000_000, "file_bytes": 1_234_000_000}
    results = tuple(combine(name, [[{**run, "more": more if name == BEHIND else {}}]] * 2) for name in WAYS)
    report = StateReport(
        settings=StateSettings(ranks=2, rounds=1),
        results=results,
        parameters=8,
        state_bytes=64,
        torch="2",
        directory=".",
        seconds=1.0,
    )

    @click.command()
    def command() -> None:
        show_state(report)

    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(command, catch_exceptions=False).stdout
    assert all(label in shown for label in WAYS.values())
    assert "…" not in shown  # nothing is cut in 80 columns
    assert "the call took 1.50 s" in shown
    assert [line.split("│")[-2].strip() for line in shown.splitlines() if "rt.save " in line] == ["yes"]


def test_memory_that_the_system_hides_is_null() -> None:
    run = {"seconds": 1.0, "peak": None, "file_bytes": 1, "more": {}}
    assert combine("save", [[run], [{**run, "peak": 5}]]).to_json()["peak_bytes_largest"] is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"ranks": 1}, "ranks must be a whole number from 2 up, got 1"),
        ({"rounds": 0}, "rounds must be a whole number from 1 up, got 0"),
        ({"state_gb": 0}, "state_gb must be from 0.001 to 1000 gigabytes, got 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        StateSettings(**arguments)


def test_a_disk_that_is_too_small_or_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"GB free, and 3000 GB are needed"):
        measure_state(StateSettings(state_gb=1000), directory=tmp_path)
    with pytest.raises(ConfigError, match="there is no directory"):
        measure_state(StateSettings(), directory=tmp_path / "none")

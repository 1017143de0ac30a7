"""``shardrt bench shard`` as users run it: everybody trains the same, and who is missing is named."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
from click.testing import CliRunner

from shardrt.bench import shard as bench_shard
from shardrt.bench.contest import DDP
from shardrt.bench.shard import (
    CONTESTANTS,
    DEEPSPEED,
    RIVALS,
    TOLERANCE,
    ShardReport,
    ShardSettings,
    combine_shard,
    missing_peers,
)
from shardrt.cli import main
from shardrt.cli.shard import show_shard
from shardrt.errors import ConfigError, UnknownPluginError
from tests.ranks.commands import answer_of

NO_DEEPSPEED = set(CONTESTANTS) - set(DEEPSPEED)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    # DeepSpeed, where it is installed, takes minutes: it is measured by people.
    chosen = [part for name in CONTESTANTS if name in NO_DEEPSPEED for part in ("--only", name)]
    return answer_of("bench", "shard", "--steps", "2", "--rounds", "1", *chosen)


@pytest.fixture(scope="module")
def rows(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in document["contestants"]}


def test_everybody_is_there_and_trains_what_ddp_trains(
    document: dict[str, Any], rows: dict[str, dict[str, Any]]
) -> None:
    assert list(rows) == [name for name in CONTESTANTS if name in NO_DEEPSPEED]
    assert all(row["alike"] and row["ranks_agree"] for row in rows.values())
    # With two ranks there is one order to add in, and halving is exact: the same bits, not only close.
    ours = {name: rows[name]["largest_parameter_difference"] for name in RIVALS}
    assert ours == dict.fromkeys(RIVALS, 0.0)
    assert document["tolerance"] == TOLERANCE and document["schedule_used"]


def test_time_memory_and_state_are_told(document: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    for name, row in rows.items():
        assert row["ms_per_step"] > 0
        # None where the system does not say: not Linux, or a container that forbids it.
        assert row["peak_bytes"] is None or row["peak_bytes"] > document["parameter_bytes"], name
        share = 1 if name == DDP else 2
        assert row["optimizer_bytes"] == pytest.approx(2 * document["parameter_bytes"] / share, rel=0.02), name
    assert rows[DDP]["times_ddp_adamw"] == 1.0


def test_each_strategy_is_compared_to_who_shards_as_much(document: dict[str, Any]) -> None:
    found = [(one["strategy"], one["rival"]) for one in document["comparisons"]]
    assert found == [(ours, rival) for ours, rivals in RIVALS.items() for rival in rivals if rival in NO_DEEPSPEED]
    assert all(one["time"] > 0 for one in document["comparisons"])


RUN = {
    "step_seconds": [12.3456],
    "optimizer_bytes": 8,
    "largest_difference": 0.0,
    "digest": "a1",
    "wire_bytes": 5_000_000_000,
    "peak_bytes": 12_345_000_000,
}


def report_of(settings: ShardSettings, odd: dict[str, dict[str, Any]] | None = None) -> ShardReport:
    return ShardReport(
        settings=settings,
        results=tuple(
            combine_shard(name, settings, [[RUN], [{**RUN, **(odd or {}).get(name, {})}]])
            for name in settings.contestants
        ),
        parameters=8,
        parameter_bytes=32,
        torch="2",
        seconds=1.0,
        missing={name: reason for name, reason in missing_peers().items() if name in settings.asked_for},
        schedule="sync",
    )


def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_shard.importlib.util, "find_spec", lambda name: None)


def test_peers_that_are_not_installed_are_named_in_tables_and_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_deepspeed(monkeypatch)
    settings = ShardSettings(steps=1, rounds=1)
    assert set(settings.contestants) == NO_DEEPSPEED and list(settings.asked_for) == list(CONTESTANTS)
    report = report_of(settings)
    monkeypatch.setenv("COLUMNS", "80")
    show_shard(report)
    shown = capsys.readouterr().out
    assert "…" not in shown  # nothing is cut in 80 columns
    assert all(label in shown for label in CONTESTANTS.values())
    assert shown.count("missing") == 2 * len(DEEPSPEED)
    assert shown.count("DeepSpeed: not installed; pip install deepspeed") == 1
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert set(document["missing"]) == set(DEEPSPEED)


def test_who_trains_something_else_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    without_deepspeed(monkeypatch)
    settings = ShardSettings(steps=1, rounds=1)
    odd = {"fsdp2_keep": {"largest_difference": 1e-3}, "full_shard": {"digest": "b2", "peak_bytes": None}}
    report = report_of(settings, odd)
    assert report.all_alike is False
    show_shard(report)
    shown = capsys.readouterr().out
    assert "NO" in shown and "different parameters under: shardrt, full_shard." in shown
    [full] = [row for row in report.to_json()["contestants"] if row["name"] == "full_shard"]
    assert (full["peak_bytes"], full["times_ddp_adamw_memory"]) == (None, None)


def test_the_fullest_rank_and_the_best_round_count() -> None:
    settings = ShardSettings(steps=1, rounds=2, absent=())
    by_rank = [[RUN | {"peak_bytes": 7}, RUN | {"peak_bytes": 5}], [RUN | {"peak_bytes": 3}, RUN | {"peak_bytes": 6}]]
    result = combine_shard("full_shard", settings, by_rank)
    assert (result.peak_bytes, result.least_peak_bytes) == ([7, 6], 6)


def test_with_deepspeed_installed_it_takes_part() -> None:
    settings = ShardSettings(absent=())
    assert list(settings.contestants) == list(CONTESTANTS)
    installed = importlib.util.find_spec("deepspeed") is not None
    assert (missing_peers() == {}) == installed


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"only": ("fsdp2_kep",)}, "unknown contestant 'fsdp2_kep'.*did you mean 'fsdp2_keep'"),
        ({"ranks": 1}, "ranks must be a whole number from 2 up, got 1"),
        ({"steps": 0}, "steps must be a whole number from 1 up, got 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ShardSettings(**arguments)


def test_a_schedule_that_is_not_installed_is_refused_before_ranks_start() -> None:
    with pytest.raises(UnknownPluginError, match="did you mean 'bucket'"):
        ShardSettings(schedule="buket")
    done = CliRunner().invoke(main, ["bench", "shard", "--only", "fsdp3"])
    assert done.exit_code == 1 and "unknown contestant 'fsdp3'" in done.stderr

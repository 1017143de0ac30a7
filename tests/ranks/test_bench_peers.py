"""``shardrt bench peers`` as users run it: everybody trains the same, and the wire says who sends what."""

from __future__ import annotations

import json
import statistics
from typing import Any

import click
import pytest
from click.testing import CliRunner

from shardrt.bench.peers import CONTESTANTS, DDP, TORCH_ZERO, PeersReport, PeersSettings, combine
from shardrt.cli.bench import _show_peers
from shardrt.errors import ConfigError
from tests.ranks.commands import answer_of

STEPS, ROUNDS, RANKS = 3, 3, 2
LOOSE = 0.25
"""The counters are the machine's: other tests' traffic is counted as well, though not in all rounds alike."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    # In the ranks too: importing torch's ZeRO warns, and only that may be silenced.
    strict = {"PYTHONWARNINGS": "error::DeprecationWarning"}
    arguments = ("--ranks", str(RANKS), "--steps", str(STEPS), "--rounds", str(ROUNDS), "--size", "small")
    return answer_of("bench", "peers", *arguments, environment=strict)


@pytest.fixture(scope="module")
def rows(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in document["contestants"]}


@pytest.mark.long
def test_the_document_says_what_was_measured_and_what_was_not(document: dict[str, Any]) -> None:
    assert [row["name"] for row in document["contestants"]] == list(CONTESTANTS)
    assert (document["ranks"], document["steps"], document["rounds"], document["size"]) == (2, STEPS, ROUNDS, "small")
    assert document["parameter_bytes"] == 4 * document["parameters"]
    assert 0.9e6 < document["parameters"] < 1.1e6
    assert document["minimum_wire_bytes_per_step"] == document["parameter_bytes"]  # 2 (N - 1) / N, of two ranks
    assert document["not_measured_here"] == ["DeepSpeed", "FSDP"]


@pytest.mark.long
def test_everybody_ends_with_the_parameters_of_ddp(rows: dict[str, dict[str, Any]]) -> None:
    # With two ranks there is one order to add in, and halving is exact: the same bits, not only close.
    assert {name: row["largest_parameter_difference"] for name, row in rows.items()} == dict.fromkeys(CONTESTANTS, 0.0)
    assert all(row["ranks_agree"] for row in rows.values())


@pytest.mark.long
def test_state_is_sharded_by_all_but_ddp(rows: dict[str, dict[str, Any]], document: dict[str, Any]) -> None:
    whole = rows[DDP]["optimizer_bytes"]
    assert whole == pytest.approx(2 * document["parameter_bytes"], rel=0.01)
    for name in CONTESTANTS.keys() - {DDP}:
        assert whole / 2 <= rows[name]["optimizer_bytes"] + 1024 < 0.55 * whole, name


@pytest.mark.long
def test_the_wire_carries_what_each_way_must_send(rows: dict[str, dict[str, Any]], document: dict[str, Any]) -> None:
    wire = {name: row["wire_bytes_per_step"] for name, row in rows.items()}
    for name, row in rows.items():
        assert len(row["wire_bytes_per_step_by_round"]) == ROUNDS
        assert wire[name] == min(row["wire_bytes_per_step_by_round"])
        assert wire[name] >= document["minimum_wire_bytes_per_step"]
        assert row["times_minimum_wire_bytes"] == wire[name] / document["minimum_wire_bytes_per_step"]
    assert rows[DDP]["times_minimum_wire_bytes"] == pytest.approx(1.0, rel=LOOSE)
    assert wire[TORCH_ZERO] == pytest.approx(1.5 * wire[DDP], rel=LOOSE)
    assert wire["shardrt_flat"] == pytest.approx(wire[DDP], rel=LOOSE)
    assert wire["shardrt_greedy"] == pytest.approx(wire[DDP], rel=LOOSE)
    # DDP has reduced everything everywhere already: the gather comes on top, as it does for torch.
    assert wire["shardrt_under_ddp"] == pytest.approx(1.5 * wire[DDP], rel=LOOSE)


@pytest.mark.long
def test_times_are_medians_of_what_is_told(rows: dict[str, dict[str, Any]]) -> None:
    for row in rows.values():
        low, high = row["ms_per_step_quartiles"]
        assert 0 < row["ms_per_step_fastest"] <= low <= row["ms_per_step"] <= high
        for against, other in (("times_ddp_adamw", rows[DDP]), ("times_torch_zero", rows[TORCH_ZERO])):
            pairs = zip(row["ms_per_step_by_round"], other["ms_per_step_by_round"], strict=True)
            assert row[against] == pytest.approx(statistics.median(mine / theirs for mine, theirs in pairs))
    assert rows[DDP]["times_ddp_adamw"] == rows[TORCH_ZERO]["times_torch_zero"] == 1.0


RUN = {"step_seconds": [0.5], "optimizer_bytes": 8, "largest_difference": 0.0, "digest": "a1", "wire_bytes": 64}
ONCE = PeersSettings(steps=1, rounds=1)


def show(report: PeersReport, monkeypatch: pytest.MonkeyPatch) -> str:
    @click.command()
    def command() -> None:
        _show_peers(report)

    monkeypatch.setenv("COLUMNS", "80")
    return CliRunner().invoke(command, catch_exceptions=False).stdout


def test_the_tables_fit_and_tell_of_ranks_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"step_seconds": [12.3456], "wire_bytes": 5_000_000_000}
    results = tuple(
        combine(name, ONCE, [[RUN | slow], [RUN | slow | ({"digest": "b2"} if name == "shardrt_flat" else {})]])
        for name in CONTESTANTS
    )
    report = PeersReport(
        settings=ONCE,
        results=results,
        parameters=8,
        parameter_bytes=32,
        torch="2",
        seconds=1.0,
    )
    assert report.ranks_agree is False
    shown = show(report, monkeypatch)
    assert "different parameters under: shardrt, flat." in shown
    assert "Not measured here: DeepSpeed, FSDP." in shown
    assert all(label in shown for label in CONTESTANTS.values())
    assert "…" not in shown  # nothing is cut in 80 columns
    assert [row["name"] for row in report.to_json()["contestants"] if not row["ranks_agree"]] == ["shardrt_flat"]


def test_the_worst_rank_counts_and_what_is_not_finite_or_not_counted_is_null() -> None:
    worse = {"step_seconds": [0.75], "optimizer_bytes": 16, "largest_difference": float("inf")}
    odd = combine(DDP, ONCE, [[RUN], [RUN | worse]])
    assert (odd.seconds, odd.quartiles, odd.optimizer_bytes) == (0.75, (0.75, 0.75), 16)
    uncounted = combine(TORCH_ZERO, ONCE, [[RUN | {"wire_bytes": None}]] * 2)
    report = PeersReport(
        settings=ONCE,
        results=(odd, uncounted),
        parameters=8,
        parameter_bytes=32,
        torch="2",
        seconds=1.0,
    )
    first, second = json.loads(json.dumps(report.to_json(), allow_nan=False))["contestants"]
    assert (first["largest_parameter_difference"], first["wire_bytes_per_step"]) == (None, 32.0)
    assert (second["wire_bytes_per_step"], second["times_minimum_wire_bytes"]) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"ranks": 1}, "ranks must be a whole number from 2 up, got 1"),
        ({"steps": 0}, "steps must be a whole number from 1 up, got 0"),
        ({"rounds": True}, "rounds must be a whole number from 1 up, got True"),
        ({"size": "smal"}, "unknown size 'smal'; sizes: small, 40m; did you mean 'small'"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        PeersSettings(**arguments)

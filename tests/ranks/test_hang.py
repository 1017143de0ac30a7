"""Ranks that are stopped, killed, raise, make other calls or stay away: the error, the reports, the explanation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardrt.cli import main
from shardrt.flight.report import read_report, report_name
from shardrt.testing import Outcome, RankPool
from tests.ranks.lost_ranks import ODD_ONE, TIMEOUT, lose

RANKS = 3
SURVIVORS = [rank for rank in range(RANKS) if rank != ODD_ONE]


def lost(ranks: RankPool, tmp_path: Path, how: str, schedule: str = "sync", **options: Any) -> list[Outcome]:
    """Whatever happens, ranks that were stopped are ended when the others have answered."""
    return ranks.outcomes(
        lose, ranks=RANKS, timeout=120, grace=90, how=how, schedule=schedule, reports=str(tmp_path), **options
    )


def explained(tmp_path: Path) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["doctor", "--hang", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def told(text: str, rank: int) -> str:
    """The line about a rank that an error ends with."""
    [line] = re.findall(rf"^  rank {rank}(?: \(this one\))?: (.*)$", text, re.MULTILINE)
    return line


@pytest.mark.parametrize("schedule", ["sync", pytest.param("interleaved", marks=pytest.mark.long)])
def test_a_stopped_rank_is_named_with_its_last_words(ranks: RankPool, tmp_path: Path, schedule: str) -> None:
    outcomes = lost(ranks, tmp_path, "stopped", schedule)
    assert outcomes[ODD_ONE].error_message == "ended by SIGKILL"
    for rank in SURVIVORS:
        found = outcomes[rank].value
        assert found["type"] in ("CommunicationError", "PeerError"), outcomes[rank]
        assert found["seconds"] < TIMEOUT + 30
        assert f"rank {ODD_ONE}" in found["text"].partition("\n")[0]
        line = told(found["text"], ODD_ONE)
        assert re.match(r"silent, last heard \d+\.\d s ago \(its process \d+ is stopped\), last finished \w+ \d+", line)
        for other in SURVIVORS:
            assert re.search(r"last finished \w+ \d+.* of (communicator|channel) \d+", told(found["text"], other))
    assert sorted(path.name for path in tmp_path.iterdir()) == [report_name(rank, RANKS) for rank in SURVIVORS]
    report = read_report(tmp_path / report_name(0, RANKS))
    assert report.about["schedule"]["name"] == schedule and "thread MainThread" in report.stacks
    assert {"reduce_scatter", "all_gather", "exchange"} <= {operation["kind"] for operation in report.operations}
    assert any(operation["bucket"] is not None for operation in report.operations)
    verdict = explained(tmp_path)
    assert verdict["cause"] == "stopped" and verdict["guilty"] == [ODD_ONE]
    assert "kill -CONT" in verdict["advice"]
    shown = CliRunner().invoke(main, ["doctor", "--hang", str(tmp_path)]).output
    assert f"ranks 0, 2 reported, rank {ODD_ONE} did not" in shown
    assert f"Likely cause (stopped): rank {ODD_ONE} is stopped" in shown


def test_a_killed_rank_is_gone(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = lost(ranks, tmp_path, "killed")
    for rank in SURVIVORS:
        found = outcomes[rank].value
        assert found["type"] in ("CommunicationError", "PeerError")
        assert f"rank {ODD_ONE}" in found["text"] and "last finished" in told(found["text"], ODD_ONE)
    verdict = explained(tmp_path)
    assert [view["reported"] for view in verdict["ranks"]] == [True, False, True]
    assert verdict["cause"] == "lost" and verdict["guilty"] == [ODD_ONE]


def test_a_rank_that_raises_is_the_cause(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = lost(ranks, tmp_path, "raised", patience=300.0)
    assert outcomes[ODD_ONE].error_type == "ValueError"
    for rank in SURVIVORS:
        found = outcomes[rank].value
        assert found["type"] == "PeerError" and found["seconds"] < 30, "it does not wait for the timeout"
        assert found["closing"] < 30, "nor does closing"
        assert "rank 1 failed: ValueError: bad batch" in found["text"].partition("\n")[0]
        assert "failed with ValueError: bad batch" in told(found["text"], ODD_ONE)
    verdict = explained(tmp_path)
    assert verdict["cause"] == "raised" and verdict["guilty"] == [ODD_ONE]
    assert verdict["text"] == "rank 1 failed by itself: ValueError: bad batch"


def test_a_rank_that_makes_other_calls_is_found_by_what_it_issued(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = lost(ranks, tmp_path, "clips")
    assert outcomes[ODD_ONE].error_type in ("CommunicationError", "PeerError")
    assert all(outcomes[rank].value["type"] in ("CommunicationError", "PeerError") for rank in SURVIVORS)
    verdict = explained(tmp_path)
    assert verdict["cause"] == "other calls" and verdict["guilty"] == [ODD_ONE], verdict
    assert verdict["parting"]["differs"] and verdict["parting"]["by_rank"]["1"] != verdict["parting"]["by_rank"]["0"]


def test_a_rank_that_is_stuck_in_its_own_code_tells_where(ranks: RankPool, tmp_path: Path) -> None:
    lost(ranks, tmp_path, "elsewhere")
    verdict = explained(tmp_path)
    assert verdict["cause"] == "busy" and verdict["guilty"] == [ODD_ONE], verdict
    assert "lost_ranks.py" in verdict["text"] and "stuck_in_my_own_code" in verdict["text"]


def test_the_reference_backend_records_too(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = lost(ranks, tmp_path, "killed", backend="reference")
    assert all("last finished all_gather" in told(outcomes[rank].value["text"], ODD_ONE) for rank in SURVIVORS)

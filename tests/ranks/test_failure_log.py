"""What is logged: JSON lines or lines for people, with the rank bound, and one event for a failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardrt
from shardrt.log import rank_logger
from shardrt.testing import RankPool


def test_json_lines_are_whole_and_complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SHARDRT_LOG_FORMAT", "json")
    monkeypatch.setenv("SHARDRT_LOG", "info")
    log = rank_logger(3, 8)
    log.debug("not.shown")
    log.info("plan.built", text='two\nlines and "quotes"', value=1.5)
    log.error("rank.failed", error=ValueError("odd"), path=Path("x"))
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    for line, level, event in ((first, "info", "plan.built"), (second, "error", "rank.failed")):
        assert (line["rank"], line["world_size"], line["level"], line["event"]) == (3, 8, level, event)
        assert line["timestamp"].startswith("20") and "T" in line["timestamp"]
    assert first["text"] == 'two\nlines and "quotes"' and "odd" in second["error"]


def test_pretty_lines_name_the_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("SHARDRT_LOG_FORMAT", raising=False)
    rank_logger(3, 8).warning("timeline.unwritten", reason="disk full")
    [line] = capsys.readouterr().err.splitlines()
    assert "timeline.unwritten" in line and "rank=3" in line and "reason='disk full'" in line


def fails(reports: str) -> None:
    with shardrt.Runtime(timeout=20, hang_reports=reports) as rt:
        model = torch.nn.Linear(2, 2)
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        if rt.rank == 1:
            raise ValueError("bad batch")
        opt.step()


@pytest.mark.parametrize("shown", ["json", "pretty"])
def test_a_failure_is_one_event_on_each_rank(ranks: RankPool, tmp_path: Path, shown: str) -> None:
    outcomes = ranks.outcomes(fails, ranks=2, env={"SHARDRT_LOG_FORMAT": shown}, reports=str(tmp_path))
    assert [outcome.error_type for outcome in outcomes] == ["PeerError", "ValueError"]
    for outcome in outcomes:
        lines = [line for line in outcome.output.splitlines() if "rank.failed" in line]
        assert len(lines) == 1, outcome.output
        if shown == "pretty":
            assert f"rank={outcome.rank}" in lines[0]
            continue
        event: dict[str, Any] = json.loads(lines[0])
        assert (event["event"], event["level"], event["rank"], event["world_size"]) == (
            "rank.failed",
            "error",
            outcome.rank,
            2,
        )
        assert event["report"] == str(tmp_path / f"rank-0000{outcome.rank}-of-00002.json")
        assert "bad batch" in event["error"] and "\n" not in event["error"]

"""Real runs that record: what is in their files, and what ranks must agree on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import shardrt
from shardrt.cli import main
from shardrt.testing import RankPool
from shardrt.timeline.reading import RankTimeline, read_timelines
from tests.ranks.twins import batch

STEPS = 4


def train(schedule: str, timelines: list[str | None], variable: str = "") -> int:
    """A few steps, recorded to a directory of each rank's own; how many buckets there are."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(size, 31) for size in (7, 31, 31)))
    os.environ["SHARDRT_TIMELINE"] = variable
    try:
        timeline = timelines[int(os.environ["RANK"])]
        with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=20, timeline=timeline) as rt:
            opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3)
            for step in range(STEPS):
                model(batch(step, rt.rank)).pow(2).mean().backward()
                opt.step()
                opt.zero_grad()
            assert (rt.timeline is None) == (timeline is None and not variable)
            return len(opt.plan.buckets)
    finally:
        os.environ.pop("SHARDRT_TIMELINE")


def operations(recorded: RankTimeline, lane: str, name: str) -> list[Any]:
    return [span for span in recorded.spans if (span.lane, span.name) == (lane, name)]


@pytest.mark.parametrize("schedule", ["sync", "bucket", "interleaved"])
def test_a_run_is_recorded_on_every_rank(ranks: RankPool, tmp_path: Path, schedule: str) -> None:
    run = tmp_path / "run"
    [buckets, _] = ranks.run(train, ranks=2, schedule=schedule, timelines=[str(run)] * 2)
    assert buckets > 1
    assert sorted(path.name for path in run.iterdir()) == ["timeline-rank0.json", "timeline-rank1.json"]
    for recorded in read_timelines([run]):
        assert recorded.about["schedule"]["name"] == schedule and recorded.about["backend"]["name"] == "shm"
        for lane, name in (("reduce", "reduce_scatter"), ("gather", "all_gather")):
            found = operations(recorded, lane, name)
            assert len(found) == STEPS * buckets
            assert all(span.thread.startswith("shardrt-") and span.details["bytes"] > 0 for span in found)
            assert sorted(span.details["bucket"] for span in found) == sorted([*range(buckets)] * STEPS)
            if schedule == "sync":
                steps = operations(recorded, "trainer", "step")
                assert all(any(step.start <= span.start <= span.end <= step.end for step in steps) for span in found)
        assert len(operations(recorded, "trainer", "step")) == STEPS
        updates = operations(recorded, "update", "update")
        assert len(updates) == STEPS * buckets
    shown = CliRunner().invoke(main, ["trace", str(run), "--json"])
    assert shown.exit_code == 0, shown.output
    document = json.loads(shown.stdout)
    assert document["steps"] == [2, STEPS] and document["notes"] == []
    for rank in document["ranks"]:
        assert rank["communication_ms"] > 0 and 0 <= rank["hidden"] <= 1
    assert (run / "timeline.html").stat().st_size > 10_000


def test_directories_may_differ_and_the_variable_works_too(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(train, ranks=2, schedule="sync", timelines=[str(tmp_path / "a"), None], variable=str(tmp_path / "b"))
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["timeline-rank0.json"]
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["timeline-rank1.json"]
    assert [one.rank for one in read_timelines([tmp_path / "a", tmp_path / "b"])] == [0, 1]


def test_a_directory_that_one_rank_cannot_write_ends_all(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    places = [str(tmp_path / "run"), str(tmp_path / "file" / "run")]
    outcomes = ranks.outcomes(train, ranks=2, schedule="sync", timelines=places)
    assert [outcome.error_type for outcome in outcomes] == ["PeerError", "ConfigError"]
    for outcome in outcomes:
        assert "no file can be written there" in outcome.error_message


def test_ranks_record_all_or_none(ranks: RankPool, tmp_path: Path) -> None:
    for outcome in ranks.outcomes(train, ranks=2, schedule="sync", timelines=[str(tmp_path / "run"), None]):
        assert outcome.error_type == "HandshakeError"
        assert "switch the timeline on for every rank or for none" in outcome.error_message

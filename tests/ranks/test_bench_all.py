"""``shardrt bench all`` as users run it, with real ranks: few contestants, small models, every form of the result."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardrt.bench.contest import DDP
from shardrt.bench.full_run import FullSettings, Progress, measure_all
from shardrt.bench.link import namespaces_of_ours
from shardrt.bench.scenario_report import measure_scenario
from shardrt.bench.scenarios import SCENARIOS, ScenarioSettings
from shardrt.cli import main
from tests.ranks.commands import answer_of
from tests.ranks.test_bench_overlap import needs_link

OURS = ("zero1/interleaved/gloo", "full_shard/sync/gloo")
ASKED = (DDP, "ddp_torch_zero", "fsdp1_full_shard", *OURS)
QUICK = ("--size", "small", "--steps", "1", "--rounds", "2", "--backend", "gloo")
ONLY = [part for name in ASKED for part in ("--only", name)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench-all")


@pytest.fixture(scope="module")
def document(folder: Path) -> dict[str, Any]:
    page = ("--html", str(folder / "page.html"))
    return answer_of("bench", "all", "--scenario", "many-small", *QUICK, *ONLY, *page)


@pytest.fixture(scope="module")
def scenario(document: dict[str, Any]) -> dict[str, Any]:
    [found] = document["scenarios"]
    assert found["state"] == "measured"
    return dict(found)


def test_everybody_that_was_asked_trains_what_ddp_trains(scenario: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in scenario["contestants"]}
    assert list(rows) == list(ASKED)
    assert scenario["all_alike"] and all(row["alike"] and row["ranks_agree"] for row in rows.values())
    # With two ranks there is one order to add in, and halving is exact: the same bits, not only close.
    assert {rows[name]["largest_parameter_difference"] for name in OURS} == {0.0}
    assert scenario["parameters"] == 1000 * 16


def test_each_row_has_time_with_spread_parts_that_add_up_memory_and_traffic(scenario: dict[str, Any]) -> None:
    assert scenario["compute_ms"] > 0
    for row in scenario["contestants"]:
        low, high = row["ms_per_step_quartiles"]
        assert 0 < low <= row["ms_per_step"] <= high and len(row["ms_per_step_by_round"]) == 2
        parts = [row["compute_ms"], row["exposed_ms"], row["update_ms"]]
        assert sum(parts) == pytest.approx(row["ms_per_step"]) and min(parts) >= 0
        # Whoever calls AdamW, in whichever thread: its time is seen.
        assert row["update_ms"] > 0, row["name"]
        # None where the system does not say: not Linux, or a container that forbids it.
        assert row["peak_bytes"] is None or row["peak_bytes"] > 0
        assert row["wire_bytes_per_step"] is None or row["wire_bytes_per_step"] > 0


def test_ratios_are_medians_of_the_rounds_ratios(scenario: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in scenario["contestants"]}
    pairs = {(one["ours"], one["rival"]): one for one in scenario["comparisons"]}
    assert set(pairs) == {
        (OURS[0], DDP),
        (OURS[0], "ddp_torch_zero"),
        (OURS[1], DDP),
        (OURS[1], "fsdp1_full_shard"),
    }
    for (ours, rival), one in pairs.items():
        rounds = zip(rows[ours]["ms_per_step_by_round"], rows[rival]["ms_per_step_by_round"], strict=True)
        assert one["time"] == pytest.approx(statistics.median(mine / theirs for mine, theirs in rounds))


def test_the_page_of_the_run_shows_each_row_and_the_command(folder: Path, scenario: dict[str, Any]) -> None:
    page = (folder / "page.html").read_text(encoding="utf-8")
    for row in scenario["contestants"]:
        assert page.count(f">{row['label']}</text>") == page.count(f">{row['label']}</th>") == 1
    assert "bench all --scenario many-small" in page


@pytest.mark.long
@needs_link
def test_over_a_link_with_two_ranks_on_each_host() -> None:
    before = set(namespaces_of_ours())
    only = [part for name in ("zero1/priority", "hybrid_shard") for part in ("--only", name)]
    document = answer_of("bench", "all", "--scenario", "hosts-1gbit-4", *QUICK, *only)
    assert set(namespaces_of_ours()) <= before
    [found] = document["scenarios"]
    rows = {row["name"]: row for row in found["contestants"]}
    assert list(rows) == [DDP, "zero1/priority/gloo", "hybrid_shard/bucket/gloo"]
    assert found["all_alike"] and found["ranks_per_host"] == 2
    for row in rows.values():
        assert row["wire_limit_ms"] == pytest.approx(8e3 * found["parameter_bytes"] / 1e9)
        # What crosses, by all ranks and both ways: at least the sums of one host to the other, and back.
        assert row["wire_bytes_per_step"] * found["ranks"] >= 2 * found["parameter_bytes"]
    # Sharded inside each host: only the averages across cross.
    crossed = rows["hybrid_shard/bucket/gloo"]["wire_bytes_per_step"] * found["ranks"]
    assert crossed < 1.1 * 2 * found["parameter_bytes"]


@pytest.mark.long
def test_progress_only_moves_forward_over_several_scenarios() -> None:
    heard: list[Progress] = []
    settings = FullSettings(
        scenarios=["few-large", "small-buckets"],
        size="small",
        steps=1,
        rounds=1,
        backends=["gloo"],
        only=["zero1/priority"],
    )
    document = measure_all(settings, command="x", on_progress=heard.append, patience=120)
    assert [one["state"] for one in document["scenarios"]] == ["measured", "measured"]
    shares = [one.share for one in heard]
    assert shares == sorted(shares) and shares[0] == 0 and 0.9 < shares[-1] <= 1
    assert {one.number for one in heard} == {1, 2} and all(one.seconds_left >= 0 for one in heard)
    json.dumps(document, allow_nan=False)


@pytest.mark.long
def test_who_refuses_to_be_built_is_left_out_with_the_reason() -> None:
    scenario = SCENARIOS["few-large"]
    settings = ScenarioSettings(steps=1, rounds=2, size="few-small", ways=(DDP, "zero1/bucked/gloo"))
    report = measure_scenario(scenario, settings)
    assert [result.name for result in report.results] == [DDP]
    assert "unknown schedule 'bucked'" in report.refused["zero1/bucked/gloo"]
    assert len(report.compute_seconds) == 2 and report.all_alike


def test_a_failure_is_in_the_document_and_in_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardrt.bench.scenario_report.launch_ranks", _fail)
    arguments = ("--scenario", "few-large", "--size", "small", "--backend", "gloo", "--json")
    done = CliRunner().invoke(main, ["bench", "all", *arguments])
    assert done.exit_code == 1
    [found] = json.loads(done.stdout)["scenarios"]
    assert (found["state"], found["reason"]) == ("failed", "rank 1 failed: ValueError: the shelf fell down")


def _fail(*args: Any, **kwargs: Any) -> list[Any]:
    from shardrt.errors import PeerError

    raise PeerError("rank 1 failed: ValueError: the shelf fell down")

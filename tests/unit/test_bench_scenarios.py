"""Scenarios of ``shardrt bench all``: who is asked, what is combined, and what cannot be is said before ranks start."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from shardrt.bench import full_run
from shardrt.bench import shard as bench_shard
from shardrt.bench.contest import DDP
from shardrt.bench.full_run import FullSettings, Pace, plan_run
from shardrt.bench.models import UNITS, build_model
from shardrt.bench.scenario_report import Split
from shardrt.bench.scenarios import SCENARIOS, ScenarioSettings, find_scenarios, ways_of
from shardrt.bench.shapes import SHAPES
from shardrt.bench.updates import updates_timed
from shardrt.bench.ways import ALL_PEERS, LEVELS, OUR_STRATEGIES, Way, backends_here
from shardrt.cli import main
from shardrt.errors import ConfigError
from shardrt.sharding.units import repeated_blocks
from tests.unit.bench_document import RUN, report_of


def test_a_split_adds_up_whatever_the_noise() -> None:
    for step, compute, update in ((1.0, 0.25, 0.5), (1.0, 2.0, 0.5), (1.0, 0.5, 3.0), (2.0, 0.0, 0.0)):
        split = Split.of([step], [compute], [update], step)
        assert split.compute + split.exposed + split.update == pytest.approx(step)
        assert min(split.compute, split.exposed, split.update) >= 0


def test_the_slowest_rank_counts_in_each_part() -> None:
    slow = {"step_seconds": [2.0, 2.0], "update_seconds": [0.5, 0.5]}
    report = report_of("small-buckets", {"zero1/priority/gloo": slow})
    row = next(row for row in report.to_json()["contestants"] if row["name"] == "zero1/priority/gloo")
    assert (row["ms_per_step"], row["compute_ms"], row["exposed_ms"], row["update_ms"]) == (2000, 500, 1000, 500)
    assert (row["times_ddp_adamw"], row["ours"], row["level"], row["schedule"]) == (1.6, True, "zero1", "priority")


def test_ours_are_compared_to_those_that_shard_as_much_and_to_ddp() -> None:
    pairs = {(one["ours"].partition("/")[0], one["rival"]) for one in report_of("loopback-2").comparisons()}
    assert {rival for ours, rival in pairs if ours == "zero1"} == {DDP, "ddp_torch_zero"}
    assert {rival for ours, rival in pairs if ours == "full_shard"} == {DDP, "fsdp2_reshard", "fsdp1_full_shard"}
    assert all(rival == DDP or LEVELS[ours] == LEVELS[rival] for ours, rival in pairs)


def test_the_wires_limit_is_for_both_ways_at_once_and_more_for_sharded_parameters() -> None:
    rows = {row["name"]: row for row in report_of("hosts-1gbit-2").to_json()["contestants"]}
    assert rows[DDP]["wire_limit_ms"] == pytest.approx(32.0)  # 4 MB at 1 Gbit/s
    assert rows["fsdp2_reshard"]["wire_limit_ms"] == pytest.approx(48.0)
    assert rows[DDP]["times_wire_limit"] == pytest.approx(1250 / 32)
    assert {row["wire_limit_ms"] for row in report_of("loopback-2").to_json()["contestants"]} == {None}


def test_every_scenario_has_ddp_first_and_both_of_its_models() -> None:
    for scenario in SCENARIOS.values():
        names = [way.name for way in ways_of(scenario, ["gloo", "other"])]
        assert names[0] == DDP and len(names) == len(set(names))
        assert sum(name.endswith("/other") for name in names) == len(scenario.ours)
        assert {scenario.size("small"), scenario.size("40m")} <= SHAPES.keys()
    assert set(SCENARIOS["loopback-2"].peers) == set(ALL_PEERS)
    assert set(LEVELS) == {*ALL_PEERS, *OUR_STRATEGIES}


def test_the_full_run_takes_less_than_25_minutes_as_told() -> None:
    assert sum(scenario.minutes for scenario in SCENARIOS.values()) < 25
    shown = CliRunner().invoke(main, ["bench", "all", "--help"]).stdout
    for name, scenario in SCENARIOS.items():
        assert any(name in line and f"{scenario.minutes:.1f} min" in line for line in shown.splitlines()), name


def test_without_a_link_its_scenarios_are_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    planned = {one.scenario.name: one for one in plan_run(FullSettings(backends=["gloo"]))}
    assert list(planned) == list(SCENARIOS)
    for name, one in planned.items():
        assert ("iproute2" in one.left_out) == name.startswith("hosts-"), name
        assert (one.minutes == 0) == name.startswith("hosts-")


def test_peers_that_are_not_installed_are_missing_and_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_shard.importlib.util, "find_spec", lambda name: None)
    [planned] = plan_run(FullSettings(scenarios=["loopback-2"], backends=["gloo"]))
    assert set(planned.missing) == {"deepspeed_1", "deepspeed_2", "deepspeed_3"}
    assert not set(planned.settings.ways) & set(planned.missing)
    [planned] = plan_run(FullSettings(scenarios=["small-buckets"], backends=["gloo"]))
    assert planned.missing == {} and {"fsdp2_keep", "deepspeed_1"} <= set(planned.not_asked)


def test_backends_that_cannot_run_are_named_and_memory_does_not_stand_in_for_a_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = (("gloo", "shm"), {"odd": "odd: no luck (try harder)"})
    monkeypatch.setattr(full_run, "backends_here", lambda asked=(): here)
    monkeypatch.setattr(full_run, "require_tools", lambda: None)
    planned = {one.scenario.name: one for one in plan_run(FullSettings(only=["zero1/priority"]))}
    near, far = planned["loopback-2"], planned["hosts-1gbit-2"]
    assert near.settings.ways == (DDP, "zero1/priority/gloo", "zero1/priority/shm")
    assert near.missing == {"zero1/priority/odd": "odd: no luck (try harder)"}
    assert far.settings.ways == (DDP, "zero1/priority/gloo")
    assert "would not cross the link" in far.missing["zero1/priority/shm"]


def test_gloo_is_here() -> None:
    usable, _ = backends_here()
    assert usable[0] == "gloo" and not {"null", "reference"} & set(usable)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"scenarios": ["loopback-3"]}, "unknown scenario 'loopback-3'.*did you mean 'loopback-"),
        ({"only": ["fsdp2_kep"]}, "unknown contestant 'fsdp2_kep'.*did you mean 'fsdp2_keep'"),
        ({"backends": ["glo"]}, "unknown backend 'glo'.*did you mean 'gloo'"),
        ({"size": "smal"}, "unknown size 'smal'; sizes: small, 40m; did you mean 'small'"),
    ],
)
def test_what_cannot_be_is_refused_before_ranks_start(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        FullSettings(**arguments)


def test_settings_must_begin_with_what_all_are_compared_to() -> None:
    with pytest.raises(ConfigError, match="the first contestant must be 'ddp_adamw'"):
        ScenarioSettings(ways=("fsdp2_keep", DDP))
    with pytest.raises(ConfigError, match="unknown contestant 'nobody'"):
        ScenarioSettings(ways=(DDP, "nobody"))


def test_a_place_that_is_not_there_is_refused_before_minutes_are_spent() -> None:
    done = CliRunner().invoke(main, ["bench", "all", "--html", "no/such/place.html"])
    assert done.exit_code == 1 and "to write 'place.html' to" in done.stderr


def test_the_estimate_follows_the_pace() -> None:
    pace = Pace(minutes=(2.0, 2.0))
    assert pace.look(0, 0.0, 5.0) == (0.0, 240.0)
    assert pace.look(0, 0.5, 30.0) == (0.25, 90.0)
    assert pace.look(1, 1.0, 99.0) == (1.0, 0.0)
    assert Pace(minutes=(0.0,)).look(0, 0.0, 1.0) == (1.0, 0.0)


@pytest.mark.parametrize("name", ["many-small", "few-small"])
def test_every_model_learns_and_its_units_are_what_rt_shard_chooses(name: str) -> None:
    torch.manual_seed(0)
    shape = SHAPES[name]
    model = build_model(shape)
    window = torch.randint(256, (shape.batch, shape.context + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(window)
        loss.backward()
        assert all(param.grad is not None for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    assert repeated_blocks(model) == {module for module in model.modules() if isinstance(module, UNITS)}


def test_the_extremes_are_as_large_as_they_say() -> None:
    with torch.device("meta"):
        many, few = (list(build_model(SHAPES[name]).parameters()) for name in ("many-40m", "few-40m"))
    assert (len(many), len(few)) == (10_000, 5)
    assert {param.numel() for param in many} == {64}
    assert 40e6 < sum(param.numel() for param in few) < 45e6


def test_the_clock_runs_in_the_update_only_and_leaves_nothing() -> None:
    before = torch.optim.AdamW.step
    layer = torch.nn.Linear(4, 4)
    with updates_timed() as clock:
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.ones(1, 4)).sum().backward()
        assert clock.read() == 0
        optimizer.step()
        assert (first := clock.read()) > 0
        optimizer.zero_grad()
        assert clock.read() == first
    assert torch.optim.AdamW.step is before
    torch.optim.AdamW(layer.parameters()).step()
    assert clock.read() == first


def test_names_of_ways_are_read_as_they_are_written() -> None:
    for way in ways_of(SCENARIOS["loopback-2"], ["gloo"]):
        assert Way.parse(way.name) == way
    assert [one.name for one in find_scenarios()] == list(SCENARIOS)
    assert RUN["update_seconds"]

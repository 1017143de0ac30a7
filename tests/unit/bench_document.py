"""A document of ``shardrt bench all`` without a run: real reports of made-up times."""

from __future__ import annotations

from typing import Any

from shardrt.bench.full_run import DOCUMENT_KIND, about_here
from shardrt.bench.scenario_report import ScenarioReport, combine_scenario
from shardrt.bench.scenarios import SCENARIOS, ScenarioSettings, ways_of
from shardrt.bench.shard import DEEPSPEED
from shardrt.bench.ways import Way

MISSING = "DeepSpeed: not installed; pip install deepspeed"
RUN = {
    "step_seconds": [1.0, 1.5],
    "update_seconds": [0.25, 0.25],
    "optimizer_bytes": 8,
    "largest_difference": 0.0,
    "digest": "a1",
    "wire_bytes": 4_000_000,
    "peak_bytes": 5_000_000,
}


def report_of(name: str, odd: dict[str, dict[str, Any]] | None = None) -> ScenarioReport:
    """Everybody of a scenario takes the same time, but for those that are given otherwise."""
    scenario = SCENARIOS[name]
    ways = [way.name for way in ways_of(scenario, ["gloo"]) if way.name not in DEEPSPEED]
    settings = ScenarioSettings(
        ranks=scenario.ranks,
        steps=2,
        rounds=1,
        size=scenario.size("small"),
        link=scenario.link,
        bucket_mb=scenario.bucket_mb,
        ways=tuple(ways),
    )
    runs = {way: RUN | (odd or {}).get(way, {}) for way in ways}
    return ScenarioReport(
        scenario=scenario,
        settings=settings,
        results=tuple(combine_scenario(way, settings, [[runs[way]]] * scenario.ranks) for way in ways),
        compute_seconds=[0.5],
        parameters=1_000_000,
        parameter_bytes=4_000_000,
        torch="2",
        seconds=3.0,
    )


def measured_scenario(name: str, odd: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    missing = [{"name": one, "label": Way.parse(one).label, "reason": MISSING} for one in DEEPSPEED]
    return {"state": "measured", **report_of(name, odd).to_json(), "missing": missing, "not_asked": []}


def document_of(*scenarios: dict[str, Any], command: str = "shardrt bench all") -> dict[str, Any]:
    return {
        "kind": DOCUMENT_KIND,
        **about_here(),
        "command": command,
        "date": "2026-01-02 03:04 UTC",
        "size": "small",
        "steps": 2,
        "rounds": 1,
        "backends": ["gloo"],
        "backends_missing": {},
        "scenarios": list(scenarios),
        "seconds": 4.0,
    }


def left_out(name: str, reason: str, state: str = "left out") -> dict[str, Any]:
    scenario = SCENARIOS[name]
    around = {"missing": [], "not_asked": [], "state": state, "reason": reason}
    return {"name": name, "title": scenario.title, "about": scenario.about, **around}

"""The simulated step: collectives against a slow twin, schedules against their formulas, the fit against a truth."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from shardrt.bench.simulate import Measured, SimulateSettings, measure_simulation
from shardrt.bench.simulate_events import FULL_SHARD, SCHEDULES, StepWork, collective, simulate_step
from shardrt.bench.simulate_formulas import EXACT, slowest_delay, step_formula
from shardrt.bench.simulate_model import ALGORITHMS, CostModel, Sample, fit, fit_error
from shardrt.cli import main
from shardrt.errors import ConfigError

MODEL = CostModel(base=3e-4, latency=3e-5, overhead=2e-5, per_byte=5e-10, reduce_per_byte=2e-10)
WORK = StepWork.share_out([4e6, 9e6, 1e6, 6e6], forward=0.02, backward=0.05, update=0.004)


def direct_message_by_message(start: list[float], nbytes: float, reduces: bool) -> list[float]:
    """The slow, obvious twin of the direct exchange: every message by itself."""
    ranks = len(start)
    turn = MODEL.overhead + nbytes / ranks * MODEL.per_byte
    done = []
    for receiver in range(ranks):
        last = start[receiver] + (ranks - 1) * turn
        for sender in range(ranks):
            if sender != receiver:
                last = max(last, start[sender] + (receiver - sender) % ranks * turn)
        added_up = (ranks - 1) / ranks * nbytes * MODEL.reduce_per_byte if reduces else 0.0
        done.append(last + MODEL.base + MODEL.latency + added_up)
    return done


def ring_round_by_round(start: list[float], nbytes: float) -> list[float]:
    ranks = len(start)
    now = [one + MODEL.base for one in start]
    for _ in range(ranks - 1):
        each = MODEL.latency + nbytes / ranks * MODEL.per_byte
        now = [max(now[rank], now[rank - 1]) + each for rank in range(ranks)]
    return now


@pytest.mark.parametrize("ranks", [2, 3, 7, 16])
def test_collectives_are_those_of_the_slow_twins(ranks: int) -> None:
    start = [random.Random(ranks * 10 + rank).random() * 1e-2 for rank in range(ranks)]
    for reduces in (True, False):
        fast = collective(MODEL, "direct")(np.array(start), 1e6, reduces)
        assert fast.tolist() == pytest.approx(direct_message_by_message(start, 1e6, reduces), rel=1e-12)
    assert collective(MODEL, "ring")(np.array(start), 1e6, False).tolist() == pytest.approx(
        ring_round_by_round(start, 1e6), rel=1e-12
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [1, 2, 5, 24, 1000])
def test_ranks_that_start_at_once_are_done_by_the_formula(algorithm: str, ranks: int) -> None:
    for reduces in (True, False):
        done = collective(MODEL, algorithm)(np.zeros(ranks), 1e7, reduces)
        assert done.max() == pytest.approx(MODEL.formula(algorithm, ranks, 1e7, reduces=reduces), rel=1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("late", [0, 3, 7])
def test_nobody_is_done_before_the_last_has_started(algorithm: str, late: int) -> None:
    start = np.zeros(8)
    start[late] = 1.0
    assert collective(MODEL, algorithm)(start, 1e3, True).min() > 1.0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", [*SCHEDULES, FULL_SHARD])
@pytest.mark.parametrize("ranks", [2, 1000])
def test_steps_follow_their_formulas(algorithm: str, kind: str, ranks: int) -> None:
    def cost(nbytes: float, reduces: bool) -> float:
        return MODEL.formula(algorithm, ranks, nbytes, reduces=reduces)

    expected = step_formula(kind, WORK, cost)
    run = collective(MODEL, algorithm)
    found = simulate_step(kind, WORK, run, np.zeros((3, ranks)))
    assert found >= expected * (1 - 1e-9)
    if kind in EXACT:
        assert found == pytest.approx(expected, rel=1e-9)
    in_turn = simulate_step(kind, WORK, run, np.zeros((3, ranks)), one_clock=True)
    assert in_turn >= found
    if kind != FULL_SHARD:  # nothing overlaps: all there is to do, one after the other
        everything = step_formula("sync", WORK, cost)
        assert in_turn == pytest.approx(everything, rel=1e-9)


def test_overlap_helps_and_delays_cost_what_the_slowest_is_late() -> None:
    run = collective(MODEL, "doubling")
    nothing = np.zeros((3, 64))
    steps = {kind: simulate_step(kind, WORK, run, nothing) for kind in SCHEDULES}
    assert steps["sync"] > steps["bucket"] > steps["interleaved"]
    delays = np.random.default_rng(1).exponential(0.01, (200, 64))
    late = simulate_step("sync", WORK, run, delays) - steps["sync"]
    assert late == pytest.approx(slowest_delay(0.01, 64), rel=0.05)


def test_the_fit_finds_the_model_and_is_never_negative() -> None:
    samples = [
        Sample(
            operation=operation,
            ranks=ranks,
            nbytes=nbytes,
            seconds=sharing * MODEL.formula("direct", ranks, nbytes, reduces=operation == "reduce_scatter"),
            sharing=sharing,
        )
        for operation in ("all_gather", "reduce_scatter")
        for ranks, sharing in ((2, 1.0), (4, 2.0), (8, 4.0))
        for nbytes in (2**12, 2**18, 2**24)
    ]
    found = fit(samples, latency=MODEL.latency)
    for name, value in MODEL.to_json().items():
        assert found.to_json()[name] == pytest.approx(value, rel=1e-6), name
    assert fit_error(found, samples) < 1e-6
    strange = [Sample(operation="all_gather", ranks=n, nbytes=8, seconds=1e-3 / n, sharing=1.0) for n in (2, 4, 8)]
    assert min(value for name, value in fit(strange, latency=1e-5).to_json().items()) >= 0


@pytest.fixture
def fitted(tmp_path: Path) -> Path:
    path = tmp_path / "fitted.json"
    measured = Measured(model=MODEL, computation={"forward": 0.2, "backward": 0.4, "update": 0.1}, off=0.1)
    path.write_text(json.dumps({"measured": measured.to_json()}))
    return path


def test_the_command_simulates_from_an_earlier_run(fitted: Path) -> None:
    run = CliRunner().invoke(
        main, ["bench", "simulate", "--fitted", str(fitted), "--size", "small", "--ranks", "1000", "--json"]
    )
    assert run.exit_code == 0, run.output
    document = json.loads(run.stdout)
    assert document["follows"] is True and document["checks"] == []
    assert len(document["steps"]) == len(ALGORITHMS) * (len(SCHEDULES) + 1)
    assert document["buckets"] > 2
    by_kind = {(step["algorithm"], step["kind"]): step for step in document["steps"]}
    assert by_kind["doubling", "sync"]["seconds"] < by_kind["ring", "sync"]["seconds"]
    table = CliRunner().invoke(
        main,
        ["bench", "simulate", "--fitted", str(fitted), "--size", "small", "--gbit", "10", "--ranks", "2000"],
    )
    assert table.exit_code == 0, table.output
    assert "a step on 2,000 ranks, ms" in table.output and "1.25 GB/s sent" in table.output


def test_the_same_seed_gives_the_same_delays(fitted: Path) -> None:
    settings = SimulateSettings(ranks=(50,), size="small", seed=3)
    first, again = (measure_simulation(settings, measured=Measured.read(fitted)).steps for _ in range(2))
    assert first == again


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"measured": {"model": {"base": 1}, "computation": {}}}'])
def test_a_document_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"is no document of `shardrt bench simulate --json`|a cost model has the"):
        Measured.read(path)


@pytest.mark.parametrize("options", [{"ranks": (1,)}, {"size": "huge"}, {"repeats": 0}, {"bucket_mb": 0.0}])
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SimulateSettings(**options)


def test_a_model_takes_no_negative_costs() -> None:
    with pytest.raises(ConfigError, match="latency of a cost model must be a number from 0 up, got -1"):
        CostModel(base=0, latency=-1, overhead=0, per_byte=0, reduce_per_byte=0)

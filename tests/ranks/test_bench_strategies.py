"""``shardrt bench strategies`` as users run it: what is counted, and what the formulas say."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from shardrt.bench.allocations import counted_allocations
from shardrt.bench.strategies import (
    STRATEGIES,
    UNSHARDED,
    StrategiesReport,
    StrategiesSettings,
    StrategyResult,
    Theory,
)
from shardrt.cli import main
from shardrt.cli.strategies import show_strategies
from shardrt.errors import ConfigError, UnknownPluginError
from tests.ranks.commands import answer_of
from tests.ranks.test_bench_overlap import needs_link


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return answer_of("bench", "strategies", "--ranks", "4", "--steps", "1", "--patience", "280")


@pytest.fixture(scope="module")
def rows(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["strategy"]: row for row in document["strategies_counted"]}


def test_every_strategy_is_counted(document: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    assert list(rows) == [UNSHARDED, *STRATEGIES]
    assert document["parameter_bytes"] == 4 * document["parameters"]
    assert {row["ranks"] for row in rows.values()} == {4}


def test_the_payload_is_what_the_formulas_say(document: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    assert document["traffic_within"] is True
    for name in STRATEGIES:
        assert rows[name]["sent_times_formula"] == pytest.approx(1, abs=0.01), name
        # All payload passes through the device, and whatever else uses it.
        assert rows[name]["device_bytes_per_step"] >= 4 * rows[name]["sent_bytes_per_step"]


def test_the_twin_holds_just_what_it_must(document: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    """The formulas' own terms, from a training that nobody shards: the measure is right if these are."""
    twin, model = rows[UNSHARDED], document["parameter_bytes"]
    assert twin["rest_bytes"] == pytest.approx(3 * model, rel=0.001)  # gradients are gone after zero_grad
    assert 4 * model < twin["peak_bytes"] < 4.25 * model
    assert twin["peak_within"] and 0 < twin["activation_bytes"] < 0.2 * model


def test_who_shards_more_holds_less(rows: dict[str, dict[str, Any]]) -> None:
    for held in ("rest_bytes", "peak_bytes"):
        order = [rows[name][held] for name in ("no_shard", "shard_optim", "full_shard")]
        assert order == sorted(order, reverse=True)
    for row in rows.values():
        assert row["peak_bytes"] >= row["rest_bytes"] > 0
        limit = 1.05 * row["formula_bytes"] + row["unit_bytes"]
        assert row["rest_within"] == (row["rest_bytes"] <= limit)


@pytest.mark.long
@needs_link
def test_hybrid_strategies_spare_the_link() -> None:
    names = ("full_shard", "hybrid_shard")
    chosen = [part for name in names for part in ("--strategy", name)]
    document = answer_of("bench", "strategies", "--link", "1gbit", "--steps", "1", "--patience", "280", *chosen)
    rows = {row["strategy"]: row for row in document["strategies_counted"]}
    for name in names:
        # Nobody else uses the device, so its counter is exact up to the headers of TCP.
        assert 1 <= rows[name]["device_bytes_per_step"] / rows[name]["crossing_formula_bytes"] < 1.1, name
    assert rows["hybrid_shard"]["device_bytes_per_step"] < rows["full_shard"]["device_bytes_per_step"] / 2


def live_bytes(kept: list[torch.Tensor]) -> int:
    """By walking: each storage once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(storages.values())


def test_allocations_are_counted_in_all_threads_and_when_storages_are_resized() -> None:
    kept: list[torch.Tensor] = []
    with counted_allocations() as counted:
        whole = torch.zeros(1000)
        kept += [whole, whole[10:20]]
        thread = threading.Thread(target=lambda: kept.append(torch.ones(500)))
        thread.start()
        thread.join()
        assert counted.live == live_bytes(kept) == 6000
        whole.untyped_storage().resize_(0)
        assert counted.live == live_bytes(kept) == 2000
        whole.untyped_storage().resize_(4000)
        assert (counted.live, counted.peak) == (6000, 6000)
        assert counted.begin() == 6000
        del whole
        kept.clear()
        gc.collect()
        assert (counted.live, counted.peak) == (0, 6000)


def test_what_else_goes_to_standard_error_meanwhile_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    import os

    with counted_allocations():
        data = torch.zeros(10)
        os.write(2, b"a word of warning\n")
    assert data.sum() == 0
    assert capfd.readouterr().err == "a word of warning\n"


@pytest.mark.parametrize(
    ("strategy", "ranks", "held", "sent", "crossing"),
    [
        ("no_shard", 2, 16_000, 4_000, 8_000),
        ("shard_optim", 4, 8_000 + 2_000, 6_000, 16_000),
        ("shard_grad_op", 4, 4_000 + 3_000, 6_000, 16_000),
        ("full_shard", 4, 4_000, 9_000 - 300, 23_200),
        ("hybrid_shard", 4, 8_000, 2_000 * 3 - 200 + 2_000, 8_000),
        ("hybrid_shard_zero2", 4, 4_000 + 6_000, 4_000 + 2_000, 8_000),
    ],
)
def test_the_formulas(strategy: str, ranks: int, held: float, sent: float, crossing: float) -> None:
    theory = Theory.of(strategy, ranks=ranks, parameter_bytes=4_000, root_bytes=400)
    assert (theory.held, theory.sent, theory.crossing) == (held, sent, pytest.approx(crossing))


def report_of(link: str = "none") -> StrategiesReport:
    settings = StrategiesSettings(ranks=(4,), link=link)
    results = tuple(
        StrategyResult(
            strategy=name,
            ranks=4,
            theory=Theory.of(name, ranks=4, parameter_bytes=4 * 10**9, root_bytes=10**6),
            unit_bytes=10**8,
            activation_bytes=10**6,
            rest_bytes=8 * 10**9,
            peak_bytes=20 * 10**9,
            peak_phase="backward",
            sent_bytes=6 * 10**9,
            device_bytes=30 * 10**9,
        )
        for name in (UNSHARDED, *STRATEGIES)
    )
    about = {"parameters": 10**9, "parameter_bytes": 4 * 10**9, "root_bytes": 10**6, "torch": "2"}
    return StrategiesReport(
        settings=settings, results=results, schedule="sync", partitioner="greedy", seconds=1.0, **about
    )


@pytest.mark.parametrize("link", ["none", "1gbit"])
def test_the_tables_fit_and_say_what_is_not_met(
    link: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show_strategies(report_of(link))
    shown = capsys.readouterr().out
    assert "…" not in shown and "NO" in shown and "yes" in shown
    assert all(shown.count(name) >= 3 for name in STRATEGIES)
    assert ("Over the link" in shown) == (link != "none")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"ranks": (2, 1)}, "ranks must be whole numbers from 2 up, got 1"),
        ({"ranks": ()}, "no number of ranks was given"),
        ({"steps": 0}, "steps must be a whole number from 1 up, got 0"),
        ({"size": "smal"}, "unknown size 'smal'; sizes: small, 40m; did you mean 'small'"),
        ({"strategies": ("ful_shard",)}, "unknown strategy 'ful_shard'.*did you mean 'full_shard'"),
        ({"ranks": (2,), "strategies": ("hybrid_shard",)}, "hybrid strategies take an even number of ranks from 4 up"),
        ({"link": "1gbit"}, "a link joins 2 hosts with 2 ranks each, got 2 and 4 ranks; use 4, or link='none'"),
        ({"link": "fast", "ranks": (4,)}, "rate must be like '1gbit'"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        StrategiesSettings(**arguments)


def test_names_that_are_not_installed_are_refused_before_ranks_start() -> None:
    with pytest.raises(UnknownPluginError, match="did you mean 'bucket'"):
        StrategiesSettings(schedule="buket")
    done = CliRunner().invoke(main, ["bench", "strategies", "--partitioner", "flatt"])
    assert done.exit_code == 1 and "did you mean 'flat'" in done.stderr

"""``shardrt bench growth`` and ``simulate`` as users run them, on few ranks."""

from __future__ import annotations

from typing import Any

import pytest

from shardrt.bench.growth import GrowthReport, GrowthSettings
from shardrt.bench.growth_fit import Curve
from shardrt.bench.simulate import KINDS
from shardrt.cli.growth import show_growth
from tests.ranks.commands import answer_of


@pytest.fixture(scope="module")
def growth() -> dict[str, Any]:
    axes = ["--axis", "parameters", "--axis", "ranks", "--axis", "buckets"]
    sizes = ["--params", "10", "--params", "40", "--ranks", "1", "--ranks", "2", "--ranks", "3", "--buckets", "4"]
    # On sizes as small as these times say nothing about growth, so either verdict is fine.
    return answer_of("bench", "growth", *axes, *sizes, "--rounds", "1", "--patience", "250", codes=(0, 1))


def test_every_cost_is_measured_along_its_axis(growth: dict[str, Any]) -> None:
    found: dict[str, dict[str, Any]] = {"parameters": {}, "ranks": {}, "buckets": {}}
    for curve in growth["curves"]:
        found[curve["axis"]][curve["what"]] = curve
    everywhere = {"optimizer", "step", "save", "load", "manifest, read"}
    assert everywhere | {"planning, greedy", "digests of a handshake"} <= set(found["parameters"])
    assert everywhere | {"Runtime", "meeting", "exchange, values alike", "store bytes, meeting"} <= set(found["ranks"])
    assert everywhere == set(found["buckets"])
    assert found["ranks"]["step"]["sizes"] == [1, 2, 3] and found["ranks"]["meeting"]["sizes"] == [2, 3]
    assert all(value > 0 for curve in growth["curves"] for value in curve.get("seconds") or curve["counts"])


def test_what_is_counted_does_not_depend_on_the_clock(growth: dict[str, Any]) -> None:
    """Per rank: write the own value, read the answer, tidy up; and the first one reads all values at once."""
    counts = {curve["what"]: curve.get("counts") for curve in growth["curves"] if curve["axis"] == "ranks"}
    assert counts["store operations, values alike"] == [8.0, 11.0]
    small, large = counts["store bytes, values alike"]
    assert large == pytest.approx(1.5 * small, rel=0.02)


def test_the_table_shows_every_size_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    curve = Curve(axis="ranks", what="a step", sizes=(2, 4, 8), seconds=(1, 4, 16), cpu=(1, 4, 16), judged_by="cpu")
    report = GrowthReport(settings=GrowthSettings(axes=("ranks",), ranks=(2, 4, 8)), curves=(curve,), seconds=1.0)
    show_growth(report)
    shown = capsys.readouterr().out
    assert "a step" in shown and "16,000.0" in shown and "2.00" in shown and "NO" in shown
    assert not report.all_within


@pytest.mark.long
def test_sixty_four_ranks_on_this_machine() -> None:
    found = answer_of(
        *("bench", "growth", "--axis", "ranks", "--ranks", "8", "--ranks", "64", "--rounds", "1"),
        codes=(0, 1),
        timeout=900,
    )
    counts = {curve["what"]: curve.get("counts") for curve in found["curves"]}
    small, large = counts["store bytes, values alike"]
    assert large < 9 * small


@pytest.mark.long
def test_a_simulation_is_fitted_to_what_was_measured() -> None:
    document = answer_of(
        *("bench", "simulate", "--size", "small", "--world", "2", "--world", "3", "--ranks", "100", "--repeats", "2")
    )
    assert document["follows"] is True
    assert {(check["ranks"], check["kind"]) for check in document["checks"]} == {(2, kind) for kind in KINDS}
    assert all(check["measured"] > 0 and check["in_turn"] >= check["overlapped"] for check in document["checks"])
    assert len(document["measured"]["samples"]) == 2 * 2 * 4
    assert document["measured"]["model"]["per_byte"] > 0

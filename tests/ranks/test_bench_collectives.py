"""``shardrt bench collectives`` as users run it, and its parts where a real run does not reach them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import shardrt
from shardrt.bench.collectives import (
    COPY,
    CROSSING,
    IN_PLACE,
    LABELS,
    TORCH,
    CollectiveResult,
    CollectivesReport,
    CollectivesSettings,
    combine,
)
from shardrt.cli import main
from shardrt.cli.collectives import show_collectives
from shardrt.errors import ConfigError, UnknownPluginError, UnsupportedError
from shardrt.protocols import Communicator
from shardrt.testing import RankPool
from tests.ranks.commands import answer_of
from tests.ranks.test_bench_overlap import needs_link


def check(document: dict[str, Any], backends: list[str]) -> None:
    """Everybody did everything, and got it right."""
    rows = document["results"]
    cases = [
        (ranks, operation, size, name)
        for ranks in document["ranks"]
        for operation in document["operations"]
        for size in document["megabytes"]
        for name in (TORCH, COPY, *backends)
    ]
    assert [(row["ranks"], row["operation"], row["megabytes"], row["name"]) for row in rows] == cases
    assert document["all_right"] is True and all(row["right"] for row in rows)
    assert {row["times_torch"] for row in rows if row["name"] == TORCH} == {1.0}
    assert {row["times_copy"] for row in rows if row["name"] == COPY} == {1.0}
    assert all(len(row["ms_by_round"]) == document["rounds"] and row["ms"] > 0 for row in rows)


def test_every_backend_does_every_operation_and_absent_ones_are_named() -> None:
    arguments = ("--mb", "0.01", "--mb", "0.3", "--ranks", "2", "--ranks", "3", "--rounds", "2")
    document = answer_of("bench", "collectives", *arguments)
    assert document["operations"] == list(CROSSING)
    names = [row["name"] for row in document["results"] if row["ranks"] == 2]
    backends = list(dict.fromkeys(names))[2:]
    assert "gloo" in backends
    check(document, backends)
    for ranks in ("2", "3"):
        missing = document["missing"][ranks]
        assert missing["null"] == "takes no more than 1 rank"
        assert missing["reference"] == "only taken by name: --backend reference"
        assert missing["nccl (cuda)"] == "for cuda; measured is the CPU"
    assert {row["wire_limit_ms"] for row in document["results"]} == {None}


@pytest.mark.long
@needs_link
def test_over_a_link_the_limit_is_told() -> None:
    arguments = ("--link", "400mbit", "--mb", "2", "--rounds", "1", "--backend", "gloo", "--backend", "reference")
    operations = ("--operation", "reduce_scatter", "--operation", "broadcast")
    document = answer_of("bench", "collectives", *arguments, *operations)
    assert document["ranks"] == [2] and document["missing"] == {"2": {}}
    check(document, ["gloo", "reference"])
    for row in document["results"]:
        half = 0.5 if row["operation"] == "reduce_scatter" else 1.0
        assert row["wire_limit_ms"] == pytest.approx(half * 2e6 * 8 / 400e6 * 1e3)
        if row["name"] == COPY:
            assert row["times_wire_limit"] is None
        else:
            # No timing of ours: bytes cannot be faster than the token bucket, whose burst is a quarter of the half.
            assert row["times_wire_limit"] > 0.7


class Allocating:
    """A communicator with memory of its own, for which there is no room on one rank if it is told so."""

    def __init__(self, communicator: Communicator, full: int | None) -> None:
        self._communicator = communicator
        self._full = full

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self._communicator.rank == self._full:
            raise UnsupportedError("there is no room here; make some")
        return torch.empty(numel, dtype=dtype)


def take_part() -> dict[str, Any]:
    """Backends with memory of their own, one without enough of it, and one that does not start."""
    from shardrt.bench.collectives_ways import Ways, is_right

    def open_backend(name: str, cleanup: ExitStack) -> Any:
        if name == "broken":
            raise UnsupportedError("this one never starts\nat all")
        rt = cleanup.enter_context(shardrt.Runtime(backend="gloo", timeout=20))
        return Allocating(rt.negotiate(["float32"]), 1 if name == "full" else None)

    with ExitStack() as cleanup:
        ways = Ways(cleanup=cleanup, largest=600, open_backend=open_backend)
        ways.add_all(["roomy", "full", "broken"])
        right = {way.name: [is_right(way, operation, 300) for operation in CROSSING] for way in ways.there}
        # A way that does nothing must be found out: the check itself is checked.
        idle = attrs.evolve(ways.there[0], operate=lambda operation, buffer, output: None)
        idle.output.zero_()
        return {
            "right": right,
            "missing": ways.missing,
            "idle": [is_right(idle, operation, 300) for operation in CROSSING],
            "rank": dist.get_rank(),
        }


def test_memory_that_peers_can_read_is_measured_where_all_ranks_have_it(ranks: RankPool) -> None:
    first, second = ranks.run(take_part, ranks=2)
    for answer in (first, second):
        assert list(answer["right"]) == [TORCH, COPY, "roomy", "roomy" + IN_PLACE, "full"]
        assert all(all(found) for found in answer["right"].values())
        assert answer["missing"]["broken"] == "this one never starts"
    assert first["missing"]["full" + IN_PLACE] == "another rank could not take part with it"
    assert second["missing"]["full" + IN_PLACE] == "there is no room here; make some"
    assert first["idle"] == [False, False, False, True]  # the source of a broadcast has nothing to do
    assert second["idle"] == [False] * 4


def result(name: str, *seconds: float, right: bool = True) -> CollectiveResult:
    return CollectiveResult(
        ranks=4,
        operation="reduce_scatter",
        megabytes=100.0,
        name=name,
        label=LABELS.get(name, name),
        round_seconds=seconds,
        is_right=right,
    )


def test_the_tables_fit_and_wrong_numbers_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = CollectivesSettings(ranks=(4,), megabytes=(100.0,), operations=("reduce_scatter",), link="1gbit")
    report = CollectivesReport(
        settings=settings,
        results=(
            result(TORCH, 1.0, 2.0, 4.0),
            result(COPY, 0.01, 0.01, 0.01),
            result("gloo", 0.5, 0.9, 1.6),
            result("shm, in place", 0.4, 0.4, 0.4, right=False),
        ),
        missing={4: {"[nccl]": "for cuda"}},
        torch="2",
        seconds=1.0,
    )
    assert report.wire_seconds("reduce_scatter", 100.0, 4) == 0.4
    assert report.all_right is False
    document = report.to_json()
    assert [row["times_torch"] for row in document["results"]] == [1.0, 0.005, 0.45, 0.2]
    assert document["results"][2]["times_wire_limit"] == pytest.approx(2.25)
    monkeypatch.setenv("COLUMNS", "80")
    show_collectives(report)
    shown = capsys.readouterr().out
    assert "…" not in shown and "700-1,250" in shown
    assert "the wire's limit" in shown and "Not measured: [nccl]: for cuda." in shown
    assert "WRONG NUMBERS: shm, in place, reduce_scatter of 100 MB on 4 ranks." in shown


def test_a_late_rank_makes_all_late() -> None:
    row = {"operation": "broadcast", "megabytes": 1.0, "name": "gloo", "label": "gloo"}
    answers = [
        {"results": [{**row, "round_seconds": [0.1, 0.4], "is_right": True}]},
        {"results": [{**row, "round_seconds": [0.2, 0.3], "is_right": False}]},
    ]
    [found] = combine(answers)
    assert found.round_seconds == (0.2, 0.4) and found.is_right is False and found.ranks == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"link": "fast"}, "rate must be like"),
        ({"link": "1gbit", "ranks": (2, 3)}, "share the ranks evenly, got 3 ranks"),
        ({"ranks": (1,)}, "ranks must be whole numbers from 2 up, got 1"),
        ({"megabytes": (0,)}, "megabytes must be from 0.001 to 10000, got 0"),
        ({"rounds": 0}, "rounds must be a whole number from 1 up, got 0"),
        ({"operations": ("all_gathr",)}, "did you mean 'all_gather'"),
        ({"operations": ()}, "nothing to measure"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        CollectivesSettings(**arguments)


def test_backends_that_are_not_installed_are_refused_before_ranks_start() -> None:
    with pytest.raises(UnknownPluginError, match="did you mean 'gloo'"):
        CollectivesSettings(backends=("glo",))
    done = CliRunner().invoke(main, ["bench", "collectives", "--backend", "glo"])
    assert done.exit_code == 1 and "did you mean 'gloo'" in done.stderr

"""Two levels: right results, bytes that cross hosts, what auto takes and why, training, lost ranks."""

from __future__ import annotations

import pytest

from shardrt.testing import RankPool
from tests.ranks import hosts_runs

TWO_BY_TWO = ["a", "a", "b", "b"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "complex64"])
def test_results_are_those_of_gloo_but_for_rounding(ranks: RankPool, dtype: str) -> None:
    found = ranks.run(hosts_runs.against_flat, ranks=4, names=TWO_BY_TWO, dtype_name=dtype)
    assert found == [[]] * 4


def test_each_byte_crosses_once_per_host(ranks: RankPool) -> None:
    numel = 40_000
    nbytes = numel * 4
    for found in ranks.run(hosts_runs.bytes_across, ranks=4, names=TWO_BY_TWO, numel=numel):
        for operation in ("reduce_scatter", "all_gather"):
            sent = found[operation]
            # Flat, a rank sends a quarter to each of three ranks, of which two are on the other host.
            assert sent["gloo"] == nbytes * 3 // 4
            assert sent["across"] == nbytes // 4 == sent["gloo"] * 2 // 3 // 2
            assert sent["flat"] == 0 and sent["whole"] == sent["inside"] + sent["across"]
        assert found["operations"] == [
            "across all_gather",
            "across reduce_scatter",
            "inside all_gather",
            "inside reduce_scatter",
        ]


@pytest.mark.parametrize(
    ("names", "taken", "reason"),
    [
        (TWO_BY_TWO, "hosts", "auto chose hosts for cpu with 4 ranks: priority 150, before gloo (100)"),
        (["a"] * 4, "shm", "auto chose shm"),
        (list("abcd"), "gloo", "hosts unavailable: rank 0 says: every rank has a host to itself"),
        (list("aaab"), "gloo", "hosts unavailable: rank 0 says: hosts have different numbers of ranks: 3 on a, 1 on b"),
        (list("abab"), "gloo", "hosts unavailable: rank 0 says: ranks of the host a are not consecutive: 0, 2"),
    ],
    ids=["two-by-two", "one-host", "one-each", "unequal", "in-turns"],
)
def test_auto_takes_what_suits_and_says_why(ranks: RankPool, names: list[str], taken: str, reason: str) -> None:
    for backend, why in ranks.run(hosts_runs.chosen, ranks=4, names=names):
        assert backend == taken and reason in why


def test_inside_and_across_are_chosen_by_name(ranks: RankPool) -> None:
    options = {"name": "hosts", "inside": {"name": "gloo", "chunk_mb": 1.0}, "across": "gloo"}
    found = ranks.run(hosts_runs.chosen, ranks=4, names=TWO_BY_TWO, backend=options)
    assert [backend for backend, _ in found] == ["hosts"] * 4
    for wrong, message in (("hosts", "must name another backend"), ("glo", "did you mean 'gloo'?")):
        backend = {"name": "hosts", "across": wrong}
        for outcome in ranks.outcomes(hosts_runs.chosen, ranks=4, names=TWO_BY_TWO, backend=backend):
            assert not outcome.ok and message in outcome.error_message


@pytest.mark.parametrize(
    ("how", "schedule"),
    [("optimizer", "sync"), ("optimizer", "priority"), ("full_shard", "bucket"), ("hybrid_shard", "sync")],
)
def test_training_ends_where_gloos_does(ranks: RankPool, how: str, schedule: str) -> None:
    for found in ranks.run(hosts_runs.trained, ranks=4, names=TWO_BY_TWO, how=how, schedule=schedule):
        assert found["backend"] == "hosts"
        assert found["difference"] < 1e-5


def test_a_killed_rank_ends_all(ranks: RankPool) -> None:
    outcomes = ranks.outcomes(hosts_runs.killed, ranks=4, init=None, names=TWO_BY_TWO, victim=3)
    assert outcomes[3].error_message == "ended by SIGKILL"
    for outcome in outcomes[:3]:
        assert outcome.ok and outcome.value, outcome
    told = [outcome.value for outcome in outcomes[:3]]
    # Whoever met the loss tells it by the number that the rank has among all, not on the level where it was met.
    levels = ("inside this host: rank 2: ", "across hosts: rank 1: ")
    assert any(level in text and "rank 3" in text.partition(level)[2] for text in told for level in levels), told

"""Ranks with uneven inputs train together whatever is sharded: those without take part in gathers too."""

from __future__ import annotations

import pytest

from shardrt.testing import RankPool
from tests.ranks.uneven_sharded import breaks, train_sharded

TOLERANCE = 2e-5
"""Where sums are formed in another order: beyond two ranks, in groups, by clipping and accumulation."""
HYBRID = {"no_shard": None, "hybrid_shard": 2, "hybrid_shard_zero2": 2}


@pytest.mark.parametrize(
    ("schedule", "policy"),
    [("sync", "active"), ("bucket", "all"), ("interleaved", "active"), ("priority", "shortest"), ("sync", "shortest")],
)
def test_full_shard_equals_the_twin(ranks: RankPool, schedule: str, policy: str) -> None:
    found = ranks.run(train_sharded, ranks=3, strategy="full_shard", schedule=schedule, policy=policy)
    assert max(one["difference"] for one in found) <= TOLERANCE, found
    assert {one["steps"] for one in found} == {3 if policy == "shortest" else 9}


def test_a_rank_without_batches_accumulation_clipping_and_evaluation(ranks: RankPool) -> None:
    options = {"batches": [0, 3], "parts": 2, "clip": 0.05, "evaluates": True}
    for one in ranks.run(train_sharded, ranks=2, strategy="full_shard", schedule="bucket", **options):
        assert one["difference"] <= TOLERANCE and one["steps"] == 7


@pytest.mark.parametrize("strategy", HYBRID)
def test_strategies_that_replicate(ranks: RankPool, strategy: str) -> None:
    options = {"batches": [3, 1, 0, 2], "shard_size": HYBRID[strategy]}
    for one in ranks.run(train_sharded, ranks=4, strategy=strategy, **options):
        assert one["difference"] <= TOLERANCE and one["steps"] == 7


@pytest.mark.parametrize("where", ["loop", "forward"])
def test_an_exception_ends_all_and_names_its_rank(ranks: RankPool, where: str) -> None:
    for outcome in ranks.outcomes(breaks, ranks=3, timeout=60, strategy="full_shard", where=where):
        if outcome.rank == 2:
            assert (outcome.error_type, outcome.error_message) == ("ValueError", "the batch is bad")
        else:
            assert outcome.error_type == "PeerError", outcome.describe()
            assert "because rank 2 failed: ValueError: the batch is bad" in outcome.error_message

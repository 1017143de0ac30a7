"""A checkpoint of one strategy and number of ranks is loaded by another of both, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardrt.testing import RankPool
from tests.ranks.sharded_twins import options_of
from tests.ranks.strategy_checkpoints import load_under, save_under


@pytest.mark.parametrize(
    ("saved", "size", "loaded", "other_size", "optimizer"),
    [
        ("full_shard", 4, "hybrid_shard_zero2", 2, "adamw_foreach"),
        ("hybrid_shard", 4, "shard_grad_op", 3, "muon"),
        ("no_shard", 2, "hybrid_shard", 4, "sgd_momentum"),
        ("shard_optim", 3, "full_shard", 4, "adamw_foreach"),
    ],
)
def test_strategy_and_ranks_may_both_change(
    ranks: RankPool, tmp_path: Path, saved: str, size: int, loaded: str, other_size: int, optimizer: str
) -> None:
    given = {"path": str(tmp_path), "name": "odd", "optimizer": optimizer}
    assert all(ranks.run(save_under, ranks=size, options=options_of(saved, size), **given))
    ways = {loaded: options_of(loaded, other_size)}
    assert ranks.run(load_under, ranks=other_size, ways=ways, **given) == [{loaded: ""}] * other_size

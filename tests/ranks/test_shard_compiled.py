"""Compiled units and models train as those that are not: hooks stay out of what is compiled."""

from __future__ import annotations

import pytest

from shardrt.testing import RankPool
from tests.ranks.sharded_compiled import every_way


@pytest.mark.parametrize(
    ("strategy", "backend", "schedule"),
    [
        ("full_shard", "aot_eager", "sync"),
        ("shard_grad_op", "aot_eager", "bucket"),
        pytest.param("full_shard", "eager", "priority", marks=pytest.mark.long),
        pytest.param("shard_optim", "aot_eager", "priority", marks=pytest.mark.long),
        pytest.param("hybrid_shard", "eager", "sync", marks=pytest.mark.long),
        pytest.param("full_shard", "inductor", "bucket", marks=pytest.mark.long),
    ],
)
def test_compiled_equals_the_twin(ranks: RankPool, strategy: str, backend: str, schedule: str) -> None:
    for found in ranks.run(every_way, ranks=2, timeout=600, strategy=strategy, backend=backend, schedule=schedule):
        assert all(value <= (2e-5 if backend == "inductor" else 0.0) for value in found.values()), found

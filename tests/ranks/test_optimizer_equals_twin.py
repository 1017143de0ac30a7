"""Sharded training equals unsharded training, for many optimizers, partitioners and world sizes."""

from __future__ import annotations

from typing import Any

import pytest

from shardrt.testing import RankPool
from tests.ranks.twins import ELEMENTWISE, OPTIMIZERS, compare

TOLERANCE = 2e-6
"""Beyond two ranks the twin adds the same gradients in the same order, but compilers may fuse differently."""
PARTITIONERS: dict[str, Any] = {
    "greedy": "greedy",
    "flat": "flat",
    "bucket": "bucket",
    "bucket_whole": {"name": "bucket", "split": False},
}


def train(optimizer: str, partitioner: Any, backend: str = "auto") -> dict[str, Any]:
    return compare(optimizer, runtime={"partitioner": partitioner, "backend": backend, "bucket_mb": 0.001})


# All cells are in the acceptance report and among the long tests; always run are the world sizes where most can differ,
# and for each of the others one partitioner: alone they are all the same, and four ranks are three and one more.
_ALWAYS = {1: ("greedy",), 2: tuple(PARTITIONERS), 3: tuple(PARTITIONERS), 4: ("bucket",)}
_CELLS = [
    pytest.param(partitioner, world_size, marks=() if partitioner in _ALWAYS[world_size] else pytest.mark.long)
    for partitioner in PARTITIONERS
    for world_size in _ALWAYS
]


@pytest.mark.parametrize(("partitioner", "world_size"), _CELLS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_thirty_steps_equal_the_twin(ranks: RankPool, optimizer: str, partitioner: str, world_size: int) -> None:
    outcomes = ranks.outcomes(train, ranks=world_size, optimizer=optimizer, partitioner=PARTITIONERS[partitioner])
    if optimizer not in ELEMENTWISE and partitioner in ("flat", "bucket"):
        for outcome in outcomes:
            assert outcome.error_type == "UnsupportedError", outcome
            assert "greedy" in outcome.error_message
            assert OPTIMIZERS[optimizer][0].__name__ in outcome.error_message
        return
    for outcome in outcomes:
        assert outcome.ok, outcome
        assert outcome.value["moved"] > 1e-3
        if world_size <= 2:
            assert outcome.value["difference"] == 0.0
        else:
            assert outcome.value["difference"] <= TOLERANCE


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_reference_backend_agrees(ranks: RankPool, world_size: int) -> None:
    for value in ranks.run(train, ranks=world_size, optimizer="adamw_foreach", partitioner="flat", backend="reference"):
        assert value["difference"] <= (0.0 if world_size == 2 else TOLERANCE)

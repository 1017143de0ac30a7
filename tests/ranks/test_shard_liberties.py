"""What a forward does to whole parameters behind our back counts in that forward, and for nobody later."""

from __future__ import annotations

import pytest

from shardrt.testing import RankPool
from tests.ranks.shard_liberties import LIBERTIES, take_liberty


@pytest.mark.parametrize(
    ("strategy", "reshard"), [("full_shard", True), ("full_shard", False), ("shard_grad_op", True)]
)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("name", LIBERTIES)
def test_a_model_computes_as_its_state_dict(
    ranks: RankPool, name: str, backend: str, strategy: str, reshard: bool
) -> None:
    options = {"name": name, "backend": backend, "strategy": strategy, "reshard": reshard}
    assert ranks.run(take_liberty, ranks=2, **options) == [0.0, 0.0]

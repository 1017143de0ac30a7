"""A module sharded by any strategy trains as its unsharded twin does."""

from __future__ import annotations

import pytest

from shardrt.testing import RankPool
from tests.ranks.sharded_twins import STRATEGIES, compare_sharded
from tests.ranks.zoo import ZOO

TOLERANCE = 5e-6
"""Beyond two ranks; at one and two every order of adding gives the same bits."""
LOOSER = {
    "convolutions": (TOLERANCE, 2e-5),  # which kernel is taken depends on where weights lie
    "mixed dtypes": (0.0, 2.0**-8),  # one unit in the last place of bfloat16
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ZOO)
def test_thirty_steps_equal_the_twin(ranks: RankPool, name: str, strategy: str, world_size: int) -> None:
    for value in ranks.run(compare_sharded, ranks=world_size, name=name, strategy=strategy):
        assert value["moved"] > 1e-3
        assert value["difference"] <= LOOSER.get(name, (0.0, TOLERANCE))[world_size > 2], value

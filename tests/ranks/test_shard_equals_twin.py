"""A module sharded by any strategy trains as its unsharded twin does."""

from __future__ import annotations

import itertools
import random

import pytest

from shardrt.testing import RankPool
from tests.ranks.sharded_twins import EVERY_STRATEGY, STRATEGIES, compare_sharded, options_of, tolerance
from tests.ranks.zoo import ZOO


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ZOO)
def test_thirty_steps_equal_the_twin(ranks: RankPool, name: str, strategy: str, world_size: int) -> None:
    for value in ranks.run(compare_sharded, ranks=world_size, name=name, strategy=strategy):
        assert value["moved"] > 1e-3
        assert value["difference"] <= tolerance(name, strategy, "adamw_foreach"), value


OTHERS = [
    cell
    for cell in itertools.product(ZOO, EVERY_STRATEGY, ("sgd_momentum", "muon"), (2, 3, 4))
    if cell[0] != "scalars" or cell[2] != "muon"  # which has nothing that Muon takes
]


@pytest.mark.parametrize(("name", "strategy", "optimizer", "size"), random.Random(4).sample(OTHERS, 16))
def test_a_sample_of_the_other_cells(ranks: RankPool, name: str, strategy: str, optimizer: str, size: int) -> None:
    """All of them are in ``python tasks.py accept strategies``."""
    options = options_of(strategy, size)
    for value in ranks.run(compare_sharded, ranks=size, name=name, optimizer=optimizer, **options):
        assert value["moved"] > 1e-3
        assert value["difference"] <= tolerance(name, strategy, optimizer), value

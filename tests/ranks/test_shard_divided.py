"""Units that are divided into parts train as those that are not, with less of them whole at a time."""

from __future__ import annotations

from typing import Any

import pytest

from shardrt.testing import RankPool
from tests.ranks.sharded_conditions import CONDITIONS, differing, run_condition
from tests.ranks.sharded_divided import BUCKET_MB, compiled_later, most_whole, used_in_every_way
from tests.ranks.sharded_scenarios import SCENARIOS, run_scenario
from tests.ranks.sharded_twins import compare_sharded, tolerance
from tests.ranks.test_shard_semantics import TOLERANCE
from tests.ranks.zoo import ZOO

TINY = {"bucket_mb": BUCKET_MB}
FEW_MODELS = ("tied transformer", "called twice")
FEW = ("evaluation between", "several forwards", "checkpointed in pairs", "raises in backward", "turning")


def _sample(names: Any, few: tuple[str, ...]) -> list[Any]:
    return [name if name in few else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", _sample(ZOO, FEW_MODELS))
def test_divided_units_equal_the_twin(ranks: RankPool, name: str) -> None:
    for value in ranks.run(
        compare_sharded, ranks=2, name=name, strategy="full_shard", steps=4, divide_units=True, runtime=TINY
    ):
        assert value["moved"] > 1e-3
        assert value["difference"] <= tolerance(name, "full_shard", "adamw_foreach"), value


@pytest.mark.parametrize("name", _sample(SCENARIOS, FEW))
def test_scenarios(ranks: RankPool, name: str) -> None:
    for value in ranks.run(run_scenario, ranks=2, name=name, strategy="full_shard", **TINY):
        assert value["difference"] <= TOLERANCE.get(name, 0.0), value


ONLY_WHOLE_UNITS = "gradients on some ranks"
"""Ranks that run different layers of a unit run different parts of a divided one: see below."""


@pytest.mark.parametrize("name", _sample([name for name in CONDITIONS if name != ONLY_WHOLE_UNITS], FEW))
def test_conditions(ranks: RankPool, name: str) -> None:
    for value in ranks.run(run_condition, ranks=2, name=name, strategy="full_shard", **TINY):
        assert value["difference"] == 0.0, value
        assert value["returned"] in (None, 0.0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"strategy": "hybrid_shard", "shard_size": 2, "prefetch": "post"}, marks=pytest.mark.long),
        pytest.param({"prefetch": None, "reshard_after_forward": 2}, marks=pytest.mark.long),
        pytest.param({"offload": True}, marks=pytest.mark.long),
    ],
)
def test_parts_are_called_read_shared_and_tied(ranks: RankPool, options: dict[str, Any]) -> None:
    for value in ranks.run(used_in_every_way, ranks=2 if not options else 4, **options):
        if "shard_size" not in options:  # groups of ranks add gradients in another order
            assert value["difference"] == 0.0, value
        assert value["difference"] < 1e-5
        assert value["parts"] == [f"blocks.1.{name}" for name in ("called", "read", "both", "twice.0", "twice.2")]
        assert value["follow"] == [f"blocks.{n}.{name}" for n in range(3) for name in ("both", "read")]
        assert value["left"] == []
        assert "unit 'blocks.0.called'" in value["said"] and "summon_full_params" in value["said"]


@pytest.mark.parametrize(("prefetch", "most"), [("pre", 0.5), ("post", 0.25), (None, 0.25)])
def test_no_more_than_two_layers_are_whole(ranks: RankPool, prefetch: str | None, most: float) -> None:
    for divided in ranks.run(most_whole, ranks=2, prefetch=prefetch):
        assert divided == {"forward": 0.25 if prefetch is None else 0.5, "backward": most}
    if prefetch == "pre":
        for whole in ranks.run(most_whole, ranks=2, prefetch=prefetch, divide_units=False):
            assert whole == {"forward": 2.0, "backward": 2.0}
        for kept in ranks.run(most_whole, ranks=2, prefetch=prefetch, reshard_after_forward=False):
            assert kept["backward"] == 3.0


def test_ranks_that_run_different_parts_are_told_so(ranks: RankPool) -> None:
    for value in ranks.run(differing, ranks=2, strategy="full_shard", ways=[[0, 1], [0, 2]], **TINY):
        assert "ranks run different units: rank " in value["said"] and "'blocks.2" in value["said"], value


def test_compiled_units_give_their_parts_up(ranks: RankPool) -> None:
    for value in ranks.run(compiled_later, ranks=2, timeout=300):
        assert value == {"before": 1, "after": [0] * 12, "difference": 0.0}

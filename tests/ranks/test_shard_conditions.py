"""Autocast, ways through a model that change or differ, exceptions, lent gradients, and what is refused."""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch

import shardrt
from shardrt.sharding.precision import cast
from shardrt.testing import RankPool
from tests.ranks.sharded_conditions import CONDITIONS, differing, run_condition
from tests.ranks.sharded_scenarios import Net
from tests.ranks.twins import batch, largest_difference

STRATEGIES = ("shard_optim", "shard_grad_op", "full_shard", "hybrid_shard")
SCHEDULES = ("sync", "bucket", "priority", "sync")
FEW = ("autocast", "raises in backward", "gradients")
"""What depends on how gradients are kept too; the others are about parameters that come and go."""


@pytest.mark.parametrize(
    ("name", "strategy"),
    [(name, one) for one in STRATEGIES for name in CONDITIONS if one == "full_shard" or name in FEW],
)
def test_condition(ranks: RankPool, name: str, strategy: str) -> None:
    schedule = SCHEDULES[STRATEGIES.index(strategy)]
    for value in ranks.run(run_condition, ranks=2, name=name, strategy=strategy, schedule=schedule):
        assert value["difference"] == 0.0, value
        assert value["returned"] in (None, 0.0)


@pytest.mark.parametrize("ways", [[[0, 1], [0, 2]], [[0, 1], [0, 1, 2]]])
def test_ranks_that_run_different_units_are_told_so(ranks: RankPool, ways: list[list[int]]) -> None:
    for value in ranks.run(differing, ranks=2, strategy="full_shard", ways=ways):
        assert "ranks run different units: rank " in value["said"] and "'blocks.2'" in value["said"], value
    for value in ranks.run(differing, ranks=2, strategy="shard_grad_op", ways=ways):
        assert value["difference"] == 0.0


def statistics(strategy: str) -> list[Any]:
    """BatchNorm's, which each rank has of its own batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 5))
    alone = copy.deepcopy(model)
    with shardrt.Runtime(timeout=30) as rt:
        model, opt = rt.shard(model, torch.optim.SGD, lr=0.0, strategy=strategy)
        for step in range(3):
            model(batch(step, rt.rank)).sum().backward()
            opt.step()
            model.zero_grad()
            alone(batch(step, rt.rank))
        return [torch.equal(model[1].running_mean, alone[1].running_mean), int(model[1].num_batches_tracked)]


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
def test_statistics_are_each_ranks_own(ranks: RankPool, strategy: str) -> None:
    assert ranks.run(statistics, ranks=2, strategy=strategy) == [[True, 3]] * 2


def zeroed_by_the_module(strategy: str) -> float:
    with shardrt.Runtime(timeout=30) as rt:
        torch.manual_seed(0)
        model, opt = rt.shard(Net(), torch.optim.SGD, lr=0.1, strategy=strategy)
        model(batch(0, rt.rank)).sum().backward()
        model.zero_grad()
        opt.step()
        with rt.summon_full_params(model):
            torch.manual_seed(0)
            return largest_difference(model.parameters(), Net().parameters())


@pytest.mark.parametrize("strategy", ["shard_grad_op", "full_shard"])
def test_zero_grad_of_the_module_drops_sharded_gradients(ranks: RankPool, strategy: str) -> None:
    assert ranks.run(zeroed_by_the_module, ranks=2, strategy=strategy) == [0.0, 0.0]


def refusals(strategy: str) -> list[str]:
    told = []
    with shardrt.Runtime(timeout=30) as rt:
        model, _ = rt.shard(Net(), torch.optim.SGD, lr=0.1, strategy=strategy)
        model.to("cpu").float()  # which changes nothing

        def summon(**options: Any) -> None:
            with rt.summon_full_params(model, with_grads=True, writeback=False, **options):
                pass

        for attempt in (
            lambda: copy.deepcopy(model),
            lambda: copy.deepcopy(model.blocks[0]),
            lambda: model.half(),
            lambda: model.blocks.to(torch.float64),
            lambda: pickle.dumps(model),
            lambda: summon(rank0_only=True),
            lambda: summon(offload_to_cpu=True),
        ):
            try:
                attempt()
                told.append("done")
            except shardrt.errors.ShardrtError as error:
                told.append(str(error))
    return told


def test_a_sharded_module_is_not_copied_pickled_or_moved(ranks: RankPool) -> None:
    said = ["cannot be copied"] * 2 + ["call .to(...) before it is sharded"] * 2 + ["cannot be pickled"]
    said += ["without rank0_only"] * 2
    for told in ranks.run(refusals, ranks=2, strategy="full_shard"):
        assert all(words in text for words, text in zip(said, told, strict=True)), told
    for told in ranks.run(refusals, ranks=2, strategy="shard_grad_op"):
        assert told[:2] == ["done"] * 2 and said[4] in told[4]


@dataclasses.dataclass(frozen=True)
class Given:
    hidden: torch.Tensor
    inner: Any


Pair = collections.namedtuple("Pair", ["left", "right"])


class Output(collections.UserDict[str, Any]):
    """A mapping of a class of its own, as the outputs of Hugging Face's models are."""


def test_inputs_of_any_kind_are_cast() -> None:
    x = torch.ones(2)
    made = cast(((Given(x, Pair(x, "text")), Output({"a": x, "n": 3})),), torch.bfloat16)
    [(given, output)] = made
    assert given.hidden.dtype == given.inner.left.dtype == output["a"].dtype == torch.bfloat16
    assert (type(output), given.inner.right, output["n"]) == (Output, "text", 3)
    same = Given(x, Pair(x, "text"))
    assert cast(same, torch.float32) is same and x.dtype == torch.float32

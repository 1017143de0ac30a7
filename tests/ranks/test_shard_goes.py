"""A sharded module that nobody holds any more goes, with all that was made for it."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch

import shardrt
from shardrt.bench.allocations import counted_allocations
from shardrt.errors import StateError
from shardrt.testing import RankPool
from tests.ranks.sharded_twins import EVERY_STRATEGY, options_of


def shard_and_drop(options: dict[str, Any]) -> list[str]:
    """What is still there."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    with shardrt.Runtime(timeout=30) as rt:
        model, opt = rt.shard(model, torch.optim.AdamW, lr=0.1, units=torch.nn.Linear, **options)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            opt.step()
            opt.zero_grad()
    made = {"module": model, "optimizer": opt, "engine": opt.engine, "parameter": model[0].weight, "runtime": rt}
    watched = {name: weakref.ref(each) for name, each in made.items()}
    del model, opt, rt, made
    deadline = time.monotonic() + 10.0
    while True:  # what autograd holds is found out step by step, and threads that end take their time
        gc.collect()
        left = [name for name, each in watched.items() if each() is not None]
        if not left or time.monotonic() > deadline:
            return left


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_nothing_keeps_it(ranks: RankPool, strategy: str) -> None:
    assert ranks.run(shard_and_drop, ranks=2, options=options_of(strategy, 2)) == [[], []]


def keep_a_parameter() -> list[str]:
    """Of a module that is gone: what reading it says, and what asking for its shape does."""
    model: Any = torch.nn.Linear(4, 4)
    with shardrt.Runtime(timeout=30) as rt:
        model, opt = rt.shard(model, torch.optim.AdamW, lr=0.1, strategy="full_shard")
        weight = model.weight
    del model, opt, rt
    gc.collect()
    try:
        weight.sum()
    except StateError as error:
        return [str(error), str(tuple(weight.shape))]
    return ["it was read"]


def test_a_parameter_that_outlives_its_module_is_not_read_as_nothing(ranks: RankPool) -> None:
    for said, shape in ranks.run(keep_a_parameter, ranks=2):
        assert (
            "is gone" in said or "summon_full_params" in said
        )  # whether other things keep the module is theirs to say
        assert shape == "(4, 4)"


LAYERS, WIDTH = 12, 256


def shard_counted(strategy: str) -> tuple[float, float]:
    """The most that is held while a model is sharded, and what is held afterwards, in whole models."""
    with shardrt.Runtime(backend="gloo", timeout=30) as rt, counted_allocations() as counted:
        before = counted.begin()
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        nbytes = sum(param.nbytes for param in model.parameters())
        model, opt = rt.shard(model, torch.optim.AdamW, lr=0.1, units=torch.nn.Linear, strategy=strategy)
        found = (counted.peak - before) / nbytes, (counted.live - before) / nbytes
        del model, opt
    return found


@pytest.mark.parametrize("count", [2, 4])
def test_sharding_holds_the_model_once_and_each_shard_twice(ranks: RankPool, count: int) -> None:
    for peak, rest in ranks.run(shard_counted, ranks=count, strategy="full_shard"):
        assert peak < 1 + 2 / count + 2 / LAYERS  # and no other copy of the model
        assert rest < 2 / count + 0.05  # parameters, and room for their gradients


class FailsOnOne(torch.optim.SGD):
    """An optimizer that one rank cannot make."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        if torch.distributed.get_rank() == 1:
            raise ValueError("not here")


def shard_in_vain() -> list[Any]:
    model = torch.nn.Linear(64, 64)
    torch.nn.init.constant_(model.weight, 2.0)
    with shardrt.Runtime(backend="gloo", timeout=30) as rt:
        try:
            rt.shard(model, FailsOnOne, lr=0.1, strategy="full_shard", elementwise=True)
        except Exception as error:
            return [type(error).__name__, model.weight.mean().item()]
    return ["sharded"]


def test_a_model_is_whole_where_another_rank_could_not_shard_it(ranks: RankPool) -> None:
    assert ranks.run(shard_in_vain, ranks=2, init="gloo") == [["PeerError", 2.0], ["ValueError", 2.0]]

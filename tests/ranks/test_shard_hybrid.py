"""Strategies that replicate: everything on every rank, or shards inside groups of ranks and the same in each."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shardrt
from shardrt.testing import RankPool
from tests.ranks.sharded_scenarios import SCENARIOS, Loop, Net
from tests.ranks.sharded_twins import compare_sharded, options_of
from tests.ranks.twins import batch, largest_difference

REPLICATING = ("no_shard", "hybrid_shard", "hybrid_shard_zero2")


@pytest.mark.parametrize("name", ["tied transformer", "adapters", "mixed dtypes"])
@pytest.mark.parametrize("strategy", REPLICATING)
def test_thirty_steps_equal_the_twin(ranks: RankPool, name: str, strategy: str) -> None:
    for value in ranks.run(compare_sharded, ranks=4, name=name, **options_of(strategy, 4)):
        assert value["moved"] > 1e-3
        assert value["difference"] == 0.0, value


def scenario(name: str, strategy: str, shard_size: int | None) -> dict[str, Any]:
    run, options = SCENARIOS[name]
    with shardrt.Runtime(timeout=30) as rt:
        loop = Loop(rt, strategy, shard_size=shard_size, **options)
        returned = run(loop)
        return {"difference": loop.difference(), "returned": returned}


@pytest.mark.parametrize("strategy", REPLICATING)
@pytest.mark.parametrize("name", ["clipping", "accumulation in no_sync", "GradScaler", "frozen and thawed"])
def test_scenario(ranks: RankPool, name: str, strategy: str) -> None:
    size = None if strategy == "no_shard" else 1
    for value in ranks.run(scenario, ranks=2, name=name, strategy=strategy, shard_size=size):
        assert value["difference"] <= 2e-5, value
        if name == "clipping":
            assert value["returned"] < 1e-5


def jittered(strategy: str) -> float:
    """Ranks whose reductions arrive at different moments must still add up replicas in one order."""
    with shardrt.Runtime(schedule="priority", bucket_mb=0.0005, timeout=20) as rt:
        loop = Loop(rt, strategy, shard_size=2, divide_units=False)
        dice = random.Random(rt.rank)
        for step in range(8):
            loop.twin_backward(step)
            loop.backward(step)
            time.sleep(dice.random() * 0.02)
            loop.step()
        return loop.difference()


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2"])
def test_replicas_agree_under_priority_whatever_arrives_first(ranks: RankPool, strategy: str) -> None:
    assert max(ranks.run(jittered, ranks=4, strategy=strategy)) <= 2e-5


def save_and_load(path: str, saved: str, loaded: str) -> list[float]:
    def options(strategy: str) -> dict[str, Any]:
        return {"strategy": strategy, "lr": 1e-2, **({"shard_size": 2} if "hybrid" in strategy else {})}

    with shardrt.Runtime(timeout=30) as rt:
        torch.manual_seed(0)
        model, opt = rt.shard(Net(), torch.optim.AdamW, **options(saved))
        for step in range(2):
            model(batch(step, rt.rank)).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
        rt.save(path, model=model, optimizer=opt)
        torch.manual_seed(1)
        fresh, again = rt.shard(Net(), torch.optim.AdamW, **options(loaded))
        rt.load(path, model=fresh, optimizer=again)
        one, other = rt.full_state_dict(opt)["state"], rt.full_state_dict(again)["state"]
        moments = [(one[n][key], other[n][key]) for n in one for key in ("exp_avg", "exp_avg_sq", "step")]
        state = largest_difference(rt.full_state_dict(model).values(), rt.full_state_dict(fresh).values())
        return [state, largest_difference(*zip(*moments, strict=True))]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pair
        for pair in itertools.product((*REPLICATING, "full_shard", "shard_optim"), repeat=2)
        if set(pair) & set(REPLICATING) and pair[0] != pair[1]
    ],
)
def test_checkpoints_between_strategies(ranks: RankPool, tmp_path: Path, saved: str, loaded: str) -> None:
    for found in ranks.run(save_and_load, ranks=4, path=str(tmp_path), saved=saved, loaded=loaded):
        assert found == [0.0, 0.0]


def bytes_kept(strategy: str, shard_size: int | None) -> int:
    with shardrt.Runtime(timeout=30) as rt:
        model, opt = rt.shard(Net(), torch.optim.AdamW, lr=1e-2, strategy=strategy, shard_size=shard_size)
        model(batch(0, rt.rank)).pow(2).mean().backward()
        opt.step()
        return opt.state_bytes()


def test_state_is_divided_inside_groups_only(ranks: RankPool) -> None:
    whole = ranks.run(bytes_kept, ranks=4, strategy="no_shard", shard_size=None)
    half = ranks.run(bytes_kept, ranks=4, strategy="hybrid_shard", shard_size=2)
    quarter = ranks.run(bytes_kept, ranks=4, strategy="full_shard", shard_size=None)
    assert len(set(whole)) == 1
    assert 0.48 < max(half) / whole[0] < 0.56 and 0.23 < max(quarter) / whole[0] < 0.31

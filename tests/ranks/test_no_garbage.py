"""Steps leave no tensors in cycles: memory goes when it is no longer used, also where Python's collector is off."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import shardrt
from shardrt.testing import RankPool
from tests.ranks.sharded_twins import EVERY_STRATEGY, options_of
from tests.ranks.zoo import TiedTransformer

BATCH = (2, 8)
STEPS = 3


@contextlib.contextmanager
def what_only_the_collector_finds() -> Iterator[list[str]]:
    """Tensors, and nodes of autograd's graphs, that were left in cycles inside the block."""
    found: list[str] = []
    for _ in range(10):  # what earlier tests have left goes step by step
        if not gc.collect():
            break
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        for thing in gc.garbage:
            if isinstance(thing, torch.Tensor):
                found.append(f"tensor of {tuple(thing.shape)}")
            elif type(thing).__name__.endswith(("Backward0", "Backward1", "AccumulateGrad")):
                found.append(type(thing).__name__)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.collect()


def a_step(model: Callable[..., torch.Tensor], opt: Any) -> None:
    model(torch.randn(BATCH)).square().mean().backward()
    opt.step()
    opt.zero_grad()


def sharded_steps(options: dict[str, Any], *, backend: str = "gloo") -> list[str]:
    """With a forward that nothing follows, and one without gradients, among them."""
    if "mixed_precision" in options:
        options = {**options, "mixed_precision": getattr(torch, options["mixed_precision"])}
    with shardrt.Runtime(timeout=30, backend=backend, bucket_mb=0.004) as rt:
        model, opt = rt.shard(
            TiedTransformer(), torch.optim.AdamW, lr=0.1, units=torch.nn.TransformerEncoderLayer, **options
        )
        a_step(model, opt)
        with what_only_the_collector_finds() as found:
            for _ in range(STEPS):
                a_step(model, opt)
                model(torch.randn(BATCH))
                with torch.no_grad():
                    model(torch.randn(BATCH))
    return found


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_a_sharded_module(ranks: RankPool, strategy: str) -> None:
    assert ranks.run(sharded_steps, ranks=2, options=options_of(strategy, 2)) == [[], []]


@pytest.mark.parametrize(
    "options",
    [
        {"divide_units": True},
        {"mixed_precision": "bfloat16"},
        {"prefetch": "post"},
        {"reshard_after_forward": 2},
    ],
    ids=str,
)
def test_other_ways_of_full_sharding(ranks: RankPool, options: dict[str, Any]) -> None:
    assert ranks.run(sharded_steps, ranks=2, options={"strategy": "full_shard", **options}) == [[], []]


def test_over_shared_memory(ranks: RankPool) -> None:
    assert ranks.run(sharded_steps, ranks=2, options={"strategy": "full_shard"}, backend="shm") == [[], []]


def optimizer_steps(schedule: str) -> list[str]:
    model = TiedTransformer()
    with shardrt.Runtime(timeout=30, backend="gloo", schedule=schedule, bucket_mb=0.004) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1)
        a_step(model, opt)
        with what_only_the_collector_finds() as found:
            for _ in range(STEPS):
                a_step(model, opt)
        opt.finish()
    return found


@pytest.mark.parametrize("schedule", ["sync", "bucket", "interleaved", "priority"])
def test_an_optimizer(ranks: RankPool, schedule: str) -> None:
    assert ranks.run(optimizer_steps, ranks=2, schedule=schedule) == [[], []]


def a_cycle() -> list[str]:
    with what_only_the_collector_finds() as found:
        holder: dict[str, Any] = {"values": torch.ones(3)}
        holder["itself"] = holder
        del holder
    return found


def test_a_cycle_is_found(ranks: RankPool) -> None:
    assert ranks.run(a_cycle, ranks=1) == [["tensor of (3,)"]]

"""An exception in a block of uneven inputs reaches all ranks, and names the one it came from."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import shardrt
from shardrt.testing import RankPool
from tests.ranks.uneven import BATCHES, SCHEDULES, WAYS, Layers, loss_of

TIMEOUT = 20
"""Of the runtime: what the others wait for at most."""


def breaks(schedule: str, way: str, rank: int, step: int, where: str = "loop", unused: bool = False) -> None:
    """One rank raises in the middle of training: in its loop, in its model's forward, or inside backward."""
    torch.manual_seed(0)
    model: Any = Layers()
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=TIMEOUT) as rt:
        module = DistributedDataParallel(model, find_unused_parameters=unused) if way == "ddp" else model
        opt = rt.optimizer(module.named_parameters(), torch.optim.SGD, lr=0.1)
        if way == "ddp":
            rt.attach(module, opt)

        def fail(*_: Any) -> None:
            raise ValueError("the batch is bad")

        with rt.join(opt):
            for number in range(BATCHES[rt.rank]):
                if (rt.rank, number) == (rank, step):
                    if where == "loop":
                        fail()
                    elif where == "forward":
                        model.layers[1].register_forward_pre_hook(fail)
                    else:
                        model.layers[1].weight.register_hook(fail)
                loss_of(module, number, rt.rank).backward()
                opt.step()
                opt.zero_grad()


def check(pool: RankPool, rank: int, **arguments: Any) -> float:
    """All four end, in time, the others with the name of the one; how long it took."""
    started = time.monotonic()
    outcomes = pool.outcomes(breaks, ranks=4, timeout=2 * TIMEOUT, rank=rank, **arguments)
    took = time.monotonic() - started
    for outcome in outcomes:
        if outcome.rank == rank:
            assert (outcome.error_type, outcome.error_message) == ("ValueError", "the batch is bad")
        else:
            assert outcome.error_type == "PeerError", outcome.describe()
            assert f"because rank {rank} failed: ValueError: the batch is bad" in outcome.error_message
    assert took < TIMEOUT
    return took


@pytest.mark.parametrize(("schedule", "way"), list(zip(SCHEDULES, WAYS * 2, strict=True)))
def test_a_rank_that_raises_while_all_are_active(ranks: RankPool, schedule: str, way: str) -> None:
    check(ranks, 1, schedule=schedule, way=way, step=2)


@pytest.mark.parametrize(("schedule", "way"), list(zip(SCHEDULES, WAYS[::-1] * 2, strict=True)))
def test_a_rank_that_raises_while_others_follow(ranks: RankPool, schedule: str, way: str) -> None:
    check(ranks, 3, schedule=schedule, way=way, step=9)


@pytest.mark.parametrize(
    ("way", "where", "schedule"),
    [
        ("plain", "backward", "bucket"),
        ("ddp", "forward", "interleaved"),
        ("ddp", "backward", "priority"),
        ("ddp", "backward", "sync"),
    ],
)
def test_a_rank_that_raises_inside_forward_or_backward(ranks: RankPool, way: str, where: str, schedule: str) -> None:
    check(ranks, 2, schedule=schedule, way=way, step=5, where=where)


def test_a_rank_that_raises_while_the_others_are_inside_ddp(ranks: RankPool) -> None:
    check(ranks, 2, schedule="bucket", way="ddp", step=5, where="forward", unused=True)


def disagrees() -> None:
    """Rank 1 clips and the others do not."""
    torch.manual_seed(0)
    model = Layers()
    with shardrt.Runtime(timeout=TIMEOUT) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
        with rt.join(opt):
            for number in range([1, 3, 2][rt.rank]):
                loss_of(model, number, rt.rank).backward()
                if rt.rank == 1 and number == 1:
                    rt.clip_grad_norm_(opt, 1.0)
                opt.step()
                opt.zero_grad()


def test_active_ranks_that_do_different_things_are_told_so(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(disagrees, ranks=3, timeout=2 * TIMEOUT):
        assert outcome.error_type in ("HandshakeError", "PeerError"), outcome.describe()
        assert "ranks that have inputs do different things: rank 1 is about to" in outcome.error_message

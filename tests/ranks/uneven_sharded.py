"""Sharded modules on uneven inputs, beside a twin on every rank that averages exactly as documented."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

import shardrt
from tests.ranks.twins import largest_difference, twins
from tests.ranks.uneven import Layers, average_over, loss_of


def train_sharded(
    strategy: str,
    schedule: str = "sync",
    policy: str = "active",
    batches: Sequence[int] = (1, 4, 3),
    shard_size: int | None = None,
    parts: int = 1,
    clip: float | None = None,
    evaluates: bool = False,
) -> dict[str, Any]:
    """Two epochs; how far this rank is from the twin that has every rank's batches, and an even step afterwards."""
    model, twin = twins(Layers)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=30) as rt:
        options: dict[str, Any] = {} if shard_size is None else {"shard_size": shard_size}
        model, opt = rt.shard(model, torch.optim.SGD, lr=0.1, momentum=0.9, strategy=strategy, **options)
        for epoch in range(2):
            with rt.join(opt, policy=policy):
                for step in range(batches[rt.rank]):
                    for part in range(parts):
                        with rt.no_sync(opt) if part < parts - 1 else contextlib.nullcontext():
                            loss_of(model, 100 * epoch + step, rt.rank, parts, part).backward()
                    if clip is not None:
                        rt.clip_grad_norm_(model, clip)
                    opt.step()
                    opt.zero_grad()
                    if evaluates:
                        with torch.no_grad():
                            loss_of(model, 7, rt.rank)
            _train_twin(twin, plain, epoch, batches, policy, parts, clip)
        loss_of(model, 50, rt.rank).backward()  # training goes on as ever
        opt.step()
        world = range(rt.world_size)
        average_over(twin, [lambda rank=rank: loss_of(twin, 50, rank) for rank in world], rt.world_size)
        plain.step()
        with rt.summon_full_params(model):
            return {"difference": largest_difference(model.parameters(), twin.parameters()), "steps": opt._steps}


def _train_twin(
    twin: torch.nn.Module, plain: Any, epoch: int, batches: Sequence[int], policy: str, parts: int, clip: float | None
) -> None:
    for step in range(min(batches) if policy == "shortest" else max(batches)):
        active = [rank for rank, count in enumerate(batches) if step < count]

        def loss(rank: int) -> torch.Tensor:
            at = 100 * epoch + step  # noqa: B023
            return sum((loss_of(twin, at, rank, parts, part) for part in range(parts)), torch.zeros(()))

        losses = [lambda rank=rank: loss(rank) for rank in active]
        average_over(twin, losses, len(active) if policy == "active" else len(batches))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)
        plain.step()


def breaks(strategy: str, where: str) -> None:
    """Rank 2 raises while rank 0 has run out."""
    torch.manual_seed(0)
    with shardrt.Runtime(timeout=20) as rt:
        model, opt = rt.shard(Layers(), torch.optim.SGD, lr=0.1, strategy=strategy)

        def fail(*_: Any) -> None:
            raise ValueError("the batch is bad")

        with rt.join(opt):
            for step in range([1, 4, 3][rt.rank]):
                if (rt.rank, step) == (2, 2):
                    if where == "loop":
                        fail()
                    model.layers[1].register_forward_pre_hook(fail)  # type: ignore[union-attr, index]
                loss_of(model, step, rt.rank).backward()
                opt.step()
                opt.zero_grad()

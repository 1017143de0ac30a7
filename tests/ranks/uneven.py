"""Training on uneven inputs, beside a twin on every rank that averages exactly as documented."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import shardrt
from tests.ranks.twins import batch, largest_difference, twins

SCHEDULES = ("sync", "bucket", "interleaved", "priority")
WAYS = ("plain", "ddp")
BATCHES = (3, 7, 7, 11)


class Layers(torch.nn.Module):
    """Enough layers for several buckets; one of them rests in every third call."""

    def __init__(self, *, rests: bool = False) -> None:
        super().__init__()
        self.inlet, self.outlet = torch.nn.Linear(7, 23), torch.nn.Linear(23, 3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(23, 23) for _ in range(3))
        self.rests = rests

    def forward(self, x: torch.Tensor, call: int = 1) -> torch.Tensor:
        x = torch.tanh(self.inlet(x))
        for index, layer in enumerate(self.layers):
            if not (self.rests and index == 1 and call % 3 == 0):
                x = torch.tanh(layer(x))
        return self.outlet(x)


def average_over(model: torch.nn.Module, losses: Sequence[Any], divisor: int) -> None:
    """Leave in ``p.grad`` the sum of the losses' gradients, added in rank order and divided once."""
    params = [param for param in model.parameters() if param.requires_grad]
    total: list[torch.Tensor | None] = [None] * len(params)
    for loss in losses:
        for param in params:
            param.grad = None
        loss().backward()
        for index, param in enumerate(params):
            if param.grad is not None:
                held = total[index]
                total[index] = param.grad if held is None else held + param.grad
    for param, gradient in zip(params, total, strict=True):
        param.grad = None if gradient is None else gradient / divisor


def loss_of(model: Any, step: int, rank: int, parts: int = 1, part: int = 0) -> torch.Tensor:
    found: torch.Tensor = model(batch(step * parts + part, rank), step).pow(2).mean() / parts
    return found


def train(
    schedule: str,
    way: str,
    policy: str = "active",
    batches: Sequence[int] = BATCHES,
    clip: float | None = None,
    parts: int = 1,
    per_batch: bool = False,
    rests: bool = False,
    epochs: int = 1,
    partitioner: str = "greedy",
    backend: str = "auto",
    gradients: Any = "average",
    **options: Any,
) -> dict[str, Any]:
    """Train for some epochs; how far this rank is from the twin that has every rank's batches."""
    ours, theirs = twins(lambda: Layers(rests=rests))
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    with shardrt.Runtime(
        schedule=schedule, partitioner=partitioner, backend=backend, bucket_mb=0.003, timeout=20
    ) as rt:
        model: Any = DistributedDataParallel(ours, **options) if way == "ddp" else ours
        opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-2, gradients=gradients)
        if way == "ddp":
            rt.attach(model, opt)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (opt, plain)]
        done = 0
        for epoch in range(epochs):
            with rt.join(opt, policy=policy, carry=schedulers[:1] if per_batch else ()):
                for step in range(batches[rt.rank]):
                    at = epoch * 100 + step
                    for part in range(parts):
                        waiting: Any = contextlib.nullcontext()
                        if part < parts - 1:
                            waiting = model.no_sync() if way == "ddp" else rt.no_sync(opt)
                        with waiting:
                            loss_of(model, at, rt.rank, parts, part).backward()
                    if clip is not None:
                        rt.clip_grad_norm_(model, clip)
                    opt.step()
                    opt.zero_grad()
                    if per_batch:
                        schedulers[0].step()
                    done += 1
            if not per_batch:
                schedulers[0].step()
            divides = policy if gradients == "average" else gradients
            _train_twin(theirs, plain, schedulers[1], epoch, batches, divides, clip, parts, per_batch)
            assert not any(param.grad is not None for param in ours.parameters())
        assert len(opt.plan.buckets) > 2 or schedule == "sync" or backend != "auto"
        return {
            "difference": largest_difference(ours.parameters(), theirs.parameters()),
            "moved": largest_difference(theirs.parameters(), twins(lambda: Layers(rests=rests))[0].parameters()),
            "done": done,
            "steps": opt._steps,
            "lr": [opt.param_groups[0]["lr"], plain.param_groups[0]["lr"]],
            "scheduler": [one.last_epoch for one in schedulers],
        }


def _train_twin(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    epoch: int,
    batches: Sequence[int],
    policy: str,
    clip: float | None,
    parts: int,
    per_batch: bool,
) -> None:
    for step in range(min(batches) if policy == "shortest" else max(batches)):
        active = [rank for rank, count in enumerate(batches) if step < count]
        losses = [lambda rank=rank: _sum_of_parts(model, epoch * 100 + step, rank, parts) for rank in active]  # noqa: B023
        average_over(model, losses, {"active": len(active), "sum": 1}.get(policy, len(batches)))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if per_batch:
            scheduler.step()
    if not per_batch:
        scheduler.step()


def _sum_of_parts(model: torch.nn.Module, step: int, rank: int, parts: int) -> torch.Tensor:
    return sum((loss_of(model, step, rank, parts, part) for part in range(parts)), torch.zeros(()))

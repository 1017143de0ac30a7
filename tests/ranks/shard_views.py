"""Modules whose whole parameters are views of all ranks' shards, beside their unsharded twins."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import shardrt_shm.communicator
import shardrt_shm.viewing
import torch

import shardrt
from shardrt.optim.sharded import ShardedOptimizer
from tests.ranks.sharded_twins import compare_ways
from tests.ranks.twins import average_backward, batch, largest_difference, twins
from tests.ranks.uneven_sharded import train_sharded

LAG_SECONDS = 0.4


class Wide(torch.nn.Module):
    """Units of some hundred pages, of sizes that end in the middle of one; a scalar, and a weight of other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = torch.nn.Linear(7, 331)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(331, 331) for _ in range(3))
        self.blocks[1].weight = torch.nn.Parameter(self.blocks[1].weight.detach().t())
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.outlet = torch.nn.Linear(331, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.outlet(x) * self.scale


class _ReadsLate(torch.autograd.Function):
    """Hands its input on, and reads a weight in backward, a while after whoever computes its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        time.sleep(ctx.seconds)
        return gradient * weight.abs().sum(), None, None


class Late(torch.nn.Module):
    """A layer whose backward reads its weight when all gradients of parameters are on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(400, 400)
        self.seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(_ReadsLate.apply(x, self.layer.weight.detach(), self.seconds))
        return made


class Scribbling(torch.nn.Linear):
    """A layer that overwrites its weight when it has computed."""

    scribbles = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        if self.scribbles:
            self.weight.data.fill_(3.0)
        return made


@contextmanager
def sharing_everything() -> Iterator[None]:
    """However small: tests have small models."""
    before = shardrt_shm.communicator._SMALLEST_SHARED
    shardrt_shm.communicator._SMALLEST_SHARED = 1
    try:
        yield
    finally:
        shardrt_shm.communicator._SMALLEST_SHARED = before


def views_of(opt: torch.optim.Optimizer) -> tuple[int, int]:
    """How many buckets are views, and how many there are."""
    assert isinstance(opt, ShardedOptimizer)
    every = opt.engine.every_buffers()
    return sum(one.view is not None for one in every), len(every)


def train_wide(schedule: str, backend: str = "shm", lacking: int | None = None, steps: int = 6) -> dict[str, Any]:
    """Beside the twin. ``lacking``: a rank that gets no shared memory."""
    model, twin = twins(Wide)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    with shardrt.Runtime(backend=backend, schedule=schedule, timeout=30) as rt:
        if rt.rank == lacking:
            shardrt_shm.communicator._SMALLEST_SHARED = 2**60
        try:
            model, opt = rt.shard(model, torch.optim.AdamW, lr=1e-2, strategy="full_shard", units=torch.nn.Linear)
        finally:
            shardrt_shm.communicator._SMALLEST_SHARED = 64 * 2**10
        for step in range(steps):
            average_backward(twin, lambda rank: twin(batch(step, rank)).pow(2).mean(), rt.world_size)  # noqa: B023
            plain.step()
            plain.zero_grad()
            with torch.no_grad():  # a forward alone, beside the others
                model(batch(step + 100, rt.rank))
            model(batch(step, rt.rank)).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
        views, _ = views_of(opt)
        with rt.summon_full_params(model):
            return {"views": views, "difference": largest_difference(model.parameters(), twin.parameters())}


def train_zoo(name: str, schedule: str) -> dict[str, Any]:
    """A model of the zoo, all of whose shards are shared."""
    with sharing_everything():
        runtime = {"backend": "shm", "schedule": schedule}
        return compare_ways(name, {"only": {"strategy": "full_shard"}}, steps=8, runtime=runtime)["only"]


def train_uneven(**options: Any) -> dict[str, Any]:
    """Ranks without inputs take part in gathers, and cannot tell when they have read."""
    with sharing_everything():
        return train_sharded("full_shard", **options)


def train_late() -> dict[str, Any]:
    """The last rank reads in backward when the others would long have updated: how far its input's gradient is off."""
    model, twin = twins(Late)
    with shardrt.Runtime(backend="shm", timeout=30) as rt:
        model.seconds = LAG_SECONDS if rt.rank == rt.world_size - 1 else 0.0  # type: ignore[assignment]
        model, opt = rt.shard(model, torch.optim.SGD, lr=1.0, strategy="full_shard", units=())
        inputs = [torch.ones(2, 400, requires_grad=True) for _ in range(2)]
        for one, x in zip((model, twin), inputs, strict=True):
            one(x).pow(2).mean().backward()
        opt.step()
        gradients = [x.grad for x in inputs if x.grad is not None]
        return {"views": views_of(opt)[0], "difference": largest_difference(gradients[:1], gradients[1:])}


class Slow(torch.nn.Module):
    """Takes its time before it computes, and may raise afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(400, 400) for _ in range(4))
        self.seconds = 0.0
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.raises:
            raise ValueError("after the last layer")
        return x


def drop_early() -> float:
    """The first rank drops the model while the last one still computes with it; how far its output is off."""
    model, twin = twins(Slow)
    x = torch.ones(2, 400)
    gc.collect()
    lingering = len(shardrt_shm.viewing._lingering)
    with shardrt.Runtime(backend="shm", timeout=30) as rt:
        model.seconds = LAG_SECONDS * (rt.rank == rt.world_size - 1)  # type: ignore[assignment]
        model, opt = rt.shard(model, torch.optim.SGD, lr=0.1, strategy="full_shard", units=())
        assert views_of(opt)[0] > 0
        made = model(x).detach()
        del model, opt
        gc.collect()
        difference = largest_difference([made], [twin(x)])
        rt.told("round", None)
        # Another model's views let go of the first one's shards.
        again, opt = rt.shard(Slow(), torch.optim.SGD, lr=0.1, strategy="full_shard", sync_module_states=True)
        again(x).sum().backward()
        opt.step()
        assert len(shardrt_shm.viewing._lingering) <= lingering
        return difference


def skip_backward() -> dict[str, Any]:
    """One rank steps without a backward of its own, where nothing is gathered in backward; all take the others'."""
    model, twin = twins(Slow)
    plain = torch.optim.SGD(twin.parameters(), lr=0.5)
    x = torch.ones(2, 400)
    with shardrt.Runtime(backend="shm", bucket_mb=0.3, timeout=20) as rt:
        model, opt = rt.shard(model, torch.optim.SGD, lr=0.5, strategy="full_shard", units=())
        for _ in range(2):
            loss = model(x).pow(2).mean()
            if rt.rank:
                loss.backward()
            opt.step()
            opt.zero_grad()
            twin(x).pow(2).mean().div(rt.world_size).mul(rt.world_size - 1).backward()
            plain.step()
            plain.zero_grad()
        with rt.summon_full_params(model):
            return {
                "views": views_of(opt)[0],
                "difference": largest_difference(model.parameters(), twin.parameters()),
            }


def raise_in_evaluation() -> float:
    """The first rank catches an error after its last unit, and all go on; how far the next output is off."""
    model, twin = twins(Slow)
    x = torch.ones(2, 400)
    with shardrt.Runtime(backend="shm", timeout=20) as rt:
        model, opt = rt.shard(model, torch.optim.SGD, lr=0.1, strategy="full_shard", units=torch.nn.Linear)
        assert views_of(opt)[0] > 0
        with torch.no_grad():
            model.raises = rt.rank == 0  # type: ignore[assignment]
            try:
                model(x)
            except ValueError:
                model.raises = False  # type: ignore[assignment]
            return largest_difference([model(x)], [twin(x)])


def views_of_compat() -> int:
    """Where the optimizer is the user's."""
    from shardrt.compat import fully_shard

    model = fully_shard(Slow())
    model(torch.ones(2, 400)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    tree = model._sharded()
    return views_of(tree.runner._optimizer())[0]


def scribble() -> dict[str, Any]:
    """What other ranks compute while one writes to its whole parameters, and what all do afterwards."""
    model, twin = twins(lambda: torch.nn.Sequential(Scribbling(300, 300)))
    x = torch.ones(2, 300)
    with shardrt.Runtime(backend="shm", timeout=30) as rt:
        goes = {"reshard_after_forward": True, "units": torch.nn.Linear}
        model, opt = rt.shard(model, torch.optim.SGD, lr=0.1, strategy="full_shard", **goes)
        differences = []
        for scribbles, with_grad in ((True, False), (True, True), (False, True), (False, False)):
            model[0].scribbles = scribbles and rt.rank == 0  # type: ignore[index]
            with torch.set_grad_enabled(with_grad):  # and no backward
                differences.append(largest_difference([model(x)], [twin(x)]))
                rt.told("round", scribbles)  # so that what was written could be seen
        return {"views": views_of(opt)[0], "differences": differences}

"""Conditions under which sharded modules are trained: autocast, changing ways through a model, exceptions in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import shardrt
from shardrt.errors import ShardrtError
from tests.ranks.sharded_scenarios import Loop, Net, plain_steps
from tests.ranks.twins import average_backward, batch


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().pow(2).mean()


class Turning(torch.nn.Module):
    """Blocks that run in another order, or not at all, from call to call: alike on all ranks unless told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(4))
        self.ways: list[list[int]] = [[0, 1, 2, 3]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at in self.ways[0]:
            x = torch.tanh(self.blocks[at](x))
        return x


class Partial(torch.nn.Module):
    """Blocks of which one rank uses more than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = torch.nn.Linear(7, 7)
        self.blocks = torch.nn.ModuleList(_Optional() for _ in range(5))

    def forward(self, x: torch.Tensor, everything: bool) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x, everything)
        return x


class _Optional(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = torch.nn.Linear(7, 7)
        self.sometimes = torch.nn.Linear(7, 7)

    def forward(self, x: torch.Tensor, everything: bool) -> torch.Tensor:
        y = torch.tanh(self.always(x))
        return y + self.sometimes(x) if everything else y


class InPlace(torch.nn.Module):
    """Units that change their inputs, and return more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = torch.nn.Linear(7, 7)
        self.blocks = torch.nn.ModuleList(_Changing() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x, nothing, _ = block(x)
            assert nothing is None
        return x


class _Changing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None, list[Any]]:
        x.add_(1.0)
        return self.inner(torch.tanh(x)), None, ["text", 3]


class Breaking(Net):
    """Raises in one of its blocks, on the way through it or on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.backward_error: BaseException | None = None
        self.blocks[1].register_forward_pre_hook(self._may_raise)  # type: ignore[arg-type]

    def _may_raise(self, module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        if self.error is not None:
            raise self.error
        if self.backward_error is not None:
            args[0].register_hook(self._raises)

    def _raises(self, _: torch.Tensor) -> None:
        assert self.backward_error is not None
        raise self.backward_error


class Interruption(BaseException):
    """As a KeyboardInterrupt, which hooks that are always called are not called for."""


def autocast(loop: Loop) -> None:
    for step in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            average_backward(loop.twin, lambda rank: _loss(loop.twin(batch(step, rank))), loop.rt.world_size)  # noqa: B023
            loss = _loss(loop.model(batch(step, loop.rt.rank)))
        loss.backward()
        loop.step()


def partial_gradients(loop: Loop) -> None:
    """A rank without a gradient that others have hands its bucket on in time: see Note [Missing on some ranks]."""
    for step in range(4):

        def loss(model: torch.nn.Module, rank: int) -> torch.Tensor:
            return _loss(model(batch(step, rank), rank == step % 2))  # noqa: B023

        average_backward(loop.twin, lambda rank: loss(loop.twin, rank), loop.rt.world_size)
        loss(loop.model, loop.rt.rank).backward()
        loop.step()


def turning(loop: Loop) -> None:
    for step, way in enumerate(([0, 1, 2, 3], [3, 2, 1, 0], [0, 2], [1, 1, 3], [0, 1, 2, 3], [2])):
        for model in (loop.model, loop.twin):
            model.ways = [way]  # type: ignore[assignment]
        loop.twin_backward(step)
        loop.backward(step)
        loop.step()


def _broken(loop: Loop, error: BaseException, *, on_the_way_back: bool) -> None:
    plain_steps(loop, 2)
    assert isinstance(loop.model, Breaking)
    setattr(loop.model, "backward_error" if on_the_way_back else "error", error)
    try:
        loop.backward(5)
    except type(error):
        loop.opt.zero_grad()
    else:
        raise AssertionError("nothing was raised")
    loop.model.error = loop.model.backward_error = None
    for step in (10, 11):
        loop.twin_backward(step)
        loop.backward(step)
        loop.step()


def summoned_gradients(loop: Loop) -> float:
    """Read between backward and step, and scaled by half; returns the largest difference of gradients."""
    worst = 0.0
    for step in range(3):
        loop.twin_backward(step)
        loop.backward(step)
        for writeback in (False, True):
            with loop.rt.summon_full_params(loop.model, with_grads=True, writeback=writeback), torch.no_grad():
                for ours, theirs in zip(loop.model.parameters(), loop.twin.parameters(), strict=True):
                    assert (ours.grad is None) == (theirs.grad is None)
                    if ours.grad is not None and theirs.grad is not None:
                        assert ours.grad.shape == ours.shape
                        worst = max(worst, float((ours.grad - theirs.grad).abs().max()))
                        ours.grad.mul_(0.5)
        for param in loop.twin.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)
        loop.step()
    return worst


CONDITIONS: dict[str, tuple[Callable[[Loop], Any], dict[str, Any]]] = {
    "autocast": (autocast, {}),
    "turning": (turning, {"build": Turning}),
    "gradients on some ranks": (partial_gradients, {"build": Partial}),
    "in place": (plain_steps, {"build": InPlace}),
    "raises": (lambda loop: _broken(loop, ValueError(), on_the_way_back=False), {"build": Breaking}),
    "interrupted": (lambda loop: _broken(loop, Interruption(), on_the_way_back=False), {"build": Breaking}),
    "raises in backward": (lambda loop: _broken(loop, ValueError(), on_the_way_back=True), {"build": Breaking}),
    "interrupted in backward": (lambda loop: _broken(loop, Interruption(), on_the_way_back=True), {"build": Breaking}),
    "gradients": (summoned_gradients, {}),
}


def run_condition(name: str, strategy: str, **runtime: Any) -> dict[str, Any]:
    """The difference between the twins afterwards, and what the condition returned."""
    run, options = CONDITIONS[name]
    with shardrt.Runtime(timeout=30, **runtime) as rt:
        loop = Loop(rt, strategy, **options, **({"shard_size": 1} if "hybrid" in strategy else {}))
        returned = run(loop)
        return {"difference": loop.difference(), "returned": returned}


def differing(strategy: str, ways: list[list[int]], **runtime: Any) -> dict[str, Any]:
    """Each rank goes another way through the model."""
    with shardrt.Runtime(timeout=20, **runtime) as rt:
        loop = Loop(rt, strategy, build=Turning)
        for step in range(3):

            def twin_loss(rank: int) -> torch.Tensor:
                loop.twin.ways = [ways[rank]]  # type: ignore[assignment]
                return _loss(loop.twin(batch(step, rank)))  # noqa: B023

            average_backward(loop.twin, twin_loss, rt.world_size)
            loop.model.ways = [ways[rt.rank]]  # type: ignore[assignment]
            try:
                loop.backward(step)
                loop.step()
            except ShardrtError as error:
                return {"said": f"{type(error).__name__}: {error}"}
        return {"difference": loop.difference()}

"""Modules whose units are divided into parts, because next to nothing travels together."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import shardrt
from shardrt.errors import StateError
from tests.ranks.sharded_scenarios import Loop, plain_steps
from tests.ranks.twins import batch

BUCKET_MB = 0.0004
"""400 bytes: whatever is larger is divided, at every layer of a few elements."""


class _Block(torch.nn.Module):
    """Layers that are called, read without a call, both, called twice, and tied to one another."""

    def __init__(self) -> None:
        super().__init__()
        self.called = torch.nn.Linear(7, 40)
        self.read = torch.nn.Linear(40, 7)
        self.both = torch.nn.Linear(7, 7)
        self.twice = torch.nn.Sequential(torch.nn.Linear(7, 24), torch.nn.Tanh(), torch.nn.Linear(24, 7))
        self.one = torch.nn.Linear(7, 7, bias=False)
        self.other = torch.nn.Linear(7, 7, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.linear(torch.tanh(self.called(x)), self.read.weight, self.read.bias)
        hidden = self.both(hidden) + torch.nn.functional.linear(x, self.both.weight)
        hidden = self.twice(torch.tanh(self.twice(hidden)))
        return torch.tanh(self.other(torch.tanh(self.one(hidden))) + x)


class Reading(torch.nn.Module):
    """Blocks in which parts are used in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 7)
        self.blocks = torch.nn.ModuleList(_Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def _runner(rt: shardrt.Runtime) -> Any:
    return next(one() for one in rt._runners.values())


def used_in_every_way(**options: Any) -> dict[str, Any]:
    """How far from the twin, which parts follow, and what is whole in the end and when a layer is read outside."""
    with shardrt.Runtime(timeout=30, bucket_mb=BUCKET_MB) as rt:
        loop = Loop(rt, build=Reading, **{"strategy": "full_shard", **options})
        runner = _runner(rt)
        plain_steps(loop, 4)
        names = [unit.name for unit in runner._units]
        try:
            said = str(loop.model.blocks[0].called.weight.sum())  # type: ignore[index, union-attr]
        except StateError as error:
            said = str(error)
        return {
            "difference": loop.difference(),
            "parts": [unit.name for unit in runner._units if unit.within == "blocks.1"],
            "follow": sorted(name for n, name in enumerate(names) if runner._parts.follows(n)),
            "left": runner.whole(),
            "said": said,
        }


class Wide(torch.nn.Module):
    """Blocks of four layers one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(*(torch.nn.Linear(7, 7) for _ in range(4))) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def most_whole(**options: Any) -> dict[str, float]:
    """The most bytes of whole parameters in forward and in backward, beside those of a block."""
    most = {"forward": 0, "backward": 0}
    with shardrt.Runtime(timeout=30, bucket_mb=BUCKET_MB) as rt:
        loop = Loop(rt, "full_shard", build=Wide, **options)
        block = sum(param.nbytes for param in loop.twin.blocks[0].parameters())  # type: ignore[index, union-attr]
        runner = _runner(rt)

        def look(*_: Any) -> None:
            direction = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
            here = sum(params.nbytes for params in runner.params if params.is_here or params.is_coming)
            most[direction] = max(most[direction], here)

        for module in loop.model.modules():
            module.register_forward_pre_hook(look)
            for param in module.parameters(recurse=False):
                param.register_hook(look)
        plain_steps(loop, 3)
        assert loop.difference() == 0.0
    return {direction: size / block for direction, size in most.items()}


def compiled_later() -> dict[str, Any]:
    """A model that is compiled when it has been sharded and trained: do layers keep hooks, and is it the twin still?"""
    with shardrt.Runtime(timeout=120, bucket_mb=BUCKET_MB) as rt, warnings.catch_warnings():
        warnings.filterwarnings("ignore")  # of the compiler's own, which looks at all that tensors have
        loop = Loop(rt, "full_shard", build=Wide)
        plain_steps(loop, 2)
        model: Any = loop.model
        before = len(model.blocks[0][1]._forward_pre_hooks)
        for block in model.blocks:
            block.compile(backend="aot_eager")
        plain_steps(loop, 2)
        with torch.no_grad():
            model(batch(9, rt.rank))
        after = [len(layer._forward_pre_hooks) for block in model.blocks for layer in block]
        return {"before": before, "after": after, "difference": loop.difference()}

"""Reentrant activation checkpointing of a sharded module, beside the same loop on the unsharded twin."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import shardrt
from tests.ranks.sharded_scenarios import Loop, plain_steps


class _Block(torch.nn.Module):
    """A unit; ``inside`` says whether a part of it is checkpointed."""

    def __init__(self, *, inside: bool = False) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(12, 23), torch.nn.Linear(23, 12)
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inside:
            return self.second(reentrant(lambda y: torch.tanh(self.first(y)), x))
        return self.second(torch.tanh(self.first(x)))


def reentrant(run: Callable[..., Any], *args: torch.Tensor) -> Any:
    with warnings.catch_warnings():  # torch's, of a checkpoint inside another, whose first forward has no gradients
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        return checkpoint(run, *args, use_reentrant=True)


class Checkpointed(torch.nn.Module):
    """Blocks in a row; ``how`` says what is checkpointed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inlet = torch.nn.Linear(7, 12)
        self.blocks = torch.nn.ModuleList(_Block(inside=how == "parts") for _ in range(6))
        self.outlet = torch.nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "first":  # nothing of the root's comes before, and so no gradient after
            return self.outlet(self._through(torch.nn.functional.pad(x, (0, 5)).requires_grad_()))
        return self.outlet(self._through(self.inlet(x)))

    def _through(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "pairs":
            for at in (0, 2, 4):
                x = x + reentrant(lambda y, at=at: self._some(y, at, at + 2), x)
        elif self.how == "nested":
            for at in (0, 3):
                x = x + reentrant(lambda y, at=at: self._nested(y, at), x)
        elif self.how == "shared":  # the same unit in two checkpoints and outside of them
            for at in (5, 0, 1, 2, 3, 4, 5):
                x = x + reentrant(self.blocks[at], x)
            x = self.blocks[5](x)
        elif self.how == "mixed":
            x = checkpoint(self._mixed, x, use_reentrant=False)
        elif self.how == "parts":
            x = self._some(x, 0, 6)
        else:
            for block in self.blocks:
                x = x + reentrant(block, x)
        return x

    def _some(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        for block in self.blocks[start:stop]:
            x = torch.tanh(block(x))
        return x

    def _nested(self, x: torch.Tensor, at: int) -> torch.Tensor:
        x = reentrant(self.blocks[at], x)
        x = torch.tanh(self.blocks[at + 1](x))
        return reentrant(self.blocks[at + 2], x)

    def _mixed(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.blocks[0](x))
        x = reentrant(lambda y: self._some(y, 1, 3), x)
        return self.blocks[3](x)


WAYS = ("each", "first", "pairs", "nested", "shared", "mixed", "parts")
MOST_WHOLE = {"pairs": 4, "nested": 3, "mixed": 5}
"""Units that are whole at once: the root, those of a segment, and one that was asked for ahead."""


def run(how: str, strategy: str, schedule: str) -> dict[str, Any]:
    """How far from the twin, and how many units were whole at once inside backward."""
    most = [0]
    with shardrt.Runtime(timeout=30, schedule=schedule, bucket_mb=0.003) as rt:
        loop = Loop(rt, strategy, build=lambda: Checkpointed(how))
        runner = next((one() for one in rt._runners.values()), None)

        def look(*_: Any) -> None:
            if runner is not None and torch._C._current_graph_task_id() != -1:
                most[0] = max(most[0], len(runner.whole()))

        for module in loop.model.modules():
            module.register_forward_hook(look)
            for param in module.parameters(recurse=False):
                param.register_hook(look)
        try:
            plain_steps(loop, 3)
        except shardrt.errors.OptimizerError as error:
            return {"said": str(error)}
        return {"difference": loop.difference(), "most": most[0], "left": runner.whole() if runner else []}

"""Liberties that a forward takes with the whole parameters of a sharded module: other data for one, NumPy's eyes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import shardrt
from tests.ranks.twins import largest_difference

WIDTH = 192


class Free(torch.nn.Linear):
    """A layer that does something to its weight before it computes, when it is told to."""

    liberty: Callable[[Free], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As a linear layer."""
        if self.liberty is not None:
            self.liberty()
        return super().forward(x)


def replace(layer: Free) -> None:
    layer.weight.data = layer.weight.data * 2.0


def reshape(layer: Free) -> None:
    layer.weight.data = layer.weight.data.t().contiguous().t() * 2.0


def show_numpy(layer: Free) -> None:
    layer.seen = layer.weight.detach().numpy()


LIBERTIES = {"other data": replace, "other strides": reshape, "NumPy": show_numpy}


def take_liberty(name: str, backend: str, strategy: str, reshard: bool) -> float:
    """How much a model computes otherwise than its state dict does, some steps after such things have happened."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(Free(WIDTH, WIDTH) for _ in range(3)))
    x = torch.linspace(-1.0, 1.0, 4 * WIDTH).view(4, WIDTH)
    with shardrt.Runtime(backend=backend, timeout=30) as rt:
        options: dict[str, Any] = {"units": torch.nn.Linear, "strategy": strategy, "reshard_after_forward": reshard}
        model, opt = rt.shard(model, torch.optim.SGD, lr=0.01, **options)
        for step in range(5):
            for layer in model:
                layer.liberty = LIBERTIES[name].__get__(layer) if step == 1 else None
            with torch.no_grad():
                model(x)
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
        plain = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        plain.load_state_dict(rt.full_state_dict(model))
        with torch.no_grad():
            return largest_difference([model(x)], [plain(x)])

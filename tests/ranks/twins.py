"""A sharded run and its unsharded twin, side by side on every rank.

The twin takes the gradients of all ranks' batches and averages them itself: at two ranks every order of adding gives
the same bits, so a sharded run must equal it exactly wherever the optimizer is elementwise or gets whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lion_pytorch
import torch

import shardrt

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "sgd_momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "adamw_foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "muon": (torch.optim.Muon, {"lr": 1e-2}),
    "lion_third_party": (lion_pytorch.Lion, {"lr": 1e-3, "weight_decay": 1e-2}),
}
ELEMENTWISE = {"sgd", "sgd_momentum", "adam", "adamw_foreach", "adamw_fused", "adagrad", "rmsprop"}


class Odd(torch.nn.Module):
    """Odd sizes, a scalar, a tied weight, a frozen one, one without elements, one that is never used."""

    def __init__(self, *, matrices_only: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(7, 13, bias=not matrices_only)
        self.inner = torch.nn.Linear(13, 13, bias=not matrices_only)
        self.tied = torch.nn.Linear(13, 13, bias=False)
        self.tied.weight = self.inner.weight
        self.out = torch.nn.Linear(13, 3, bias=not matrices_only)
        if not matrices_only:
            self.scale = torch.nn.Parameter(torch.tensor(1.5))
            self.frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)
            self.unused = torch.nn.Parameter(torch.randn(4, 4))
            self.nothing = torch.nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(torch.tanh(self.embed(x))))
        x = self.out(torch.tanh(self.tied(x)))
        return x * self.scale if hasattr(self, "scale") else x


def batch(step: int, rank: int, width: int = 7) -> torch.Tensor:
    """The data of one rank at one step."""
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1000 * step + rank))


def average_backward(
    model: torch.nn.Module, loss: Callable[[int], torch.Tensor], world_size: int, group_size: int | None = None
) -> None:
    """Leave the average over all ranks' losses in ``p.grad``, adding in rank order and dividing once; or first inside
    groups of neighbouring ranks and then over the groups, which is another order of adding."""
    params = [param for param in model.parameters() if param.requires_grad]
    before = [param.grad for param in params]
    found: list[list[torch.Tensor | None]] = []
    for rank in range(world_size):
        for param in params:
            param.grad = None
        loss(rank).backward()
        found.append([param.grad for param in params])
    size = group_size or world_size
    groups = [average(found[first : first + size]) for first in range(0, world_size, size)]
    for param, reduced, earlier in zip(params, average(groups), before, strict=True):
        param.grad = reduced if earlier is None else earlier if reduced is None else earlier + reduced


def average(ranks: Sequence[Sequence[torch.Tensor | None]]) -> list[torch.Tensor | None]:
    """Of the gradients of each parameter; sums are formed in float32 at least, as communicators do."""
    averaged: list[torch.Tensor | None] = []
    for gradients in zip(*ranks, strict=True):
        there = [gradient for gradient in gradients if gradient is not None]
        if len(gradients) == 1 or not there:
            averaged.append(gradients[0])
            continue
        wide = torch.promote_types(there[0].dtype, torch.float32)
        total = there[0].to(wide)
        for gradient in there[1:]:
            total = total + gradient
        averaged.append((total / len(gradients)).to(there[0].dtype))
    return averaged


def largest_difference(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> float:
    """The largest absolute difference between two lists of tensors; fails on NaN."""
    found = [0.0]
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        if one.numel():
            found.append((one.detach() - other.detach()).abs().max().item())
    assert all(value == value for value in found)
    return max(found)


def twins(build: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The same model twice."""
    torch.manual_seed(7)
    model = build()
    torch.manual_seed(7)
    return model, build()


def compare(
    optimizer: str,
    steps: int = 30,
    *,
    build: Callable[[], torch.nn.Module] | None = None,
    runtime: dict[str, Any] | None = None,
    gradients: str = "average",
) -> dict[str, Any]:
    """Train both twins and tell the largest difference of any parameter."""
    optimizer_class, defaults = OPTIMIZERS[optimizer]
    model, twin = twins(build or (lambda: Odd(matrices_only=optimizer == "muon")))
    with shardrt.Runtime(timeout=30, **(runtime or {})) as rt:
        opt = rt.optimizer(model.named_parameters(), optimizer_class, gradients=gradients, **defaults)
        plain = optimizer_class(twin.parameters(), **defaults)
        for step in range(steps):
            average_backward(twin, lambda rank: twin(batch(step, rank)).pow(2).mean(), rt.world_size)  # noqa: B023
            plain.step()
            plain.zero_grad()
            model(batch(step, rt.rank)).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
        return {
            "difference": largest_difference(model.parameters(), twin.parameters()),
            "state_bytes": opt.state_bytes(),
            "moved": largest_difference(twin.parameters(), twins(build or Odd)[0].parameters())
            if optimizer != "muon"
            else 1.0,
        }

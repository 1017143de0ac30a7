"""Portable states and hostile pickles for tests of readers and writers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from shardrt.state.portable import LazyTensor, PortableOptimizer, PortableState


class Canary:
    """Unpickled, it makes a file: its absence shows that nothing was run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def same(one: Any, other: Any) -> bool:
    """Whether two trees are the same in types, order, dtypes, shapes and bits."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(bits(one), bits(other))
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, for comparing NaN with NaN."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def whole(value: Any) -> Any:
    """A tree with every lazy tensor read."""
    if isinstance(value, LazyTensor):
        return value.whole()
    if isinstance(value, PortableOptimizer):
        return {"groups": [dict(group) for group in value.groups], "state": whole(dict(value.state))}
    if isinstance(value, PortableState):
        return {
            "models": {name: whole(dict(model)) for name, model in value.models.items()},
            "optimizers": {name: whole(optimizer) for name, optimizer in value.optimizers.items()},
            "extra": value.extra,
        }
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    return value


def small_state() -> PortableState:
    """A model of several dtypes with a tied weight, stepped unevenly."""
    tied = LazyTensor.of(torch.randn(3, 5))
    model = {
        "a.weight": tied,
        "a.half": LazyTensor.of(torch.randn(7).to(torch.bfloat16)),
        "b.weight": tied,
        "count": LazyTensor.of(torch.tensor(3)),
        "mask": LazyTensor.of(torch.tensor([True, False])),
        "nothing": LazyTensor.of(torch.empty(0, 4)),
        "odd": LazyTensor.of(torch.tensor([float("nan"), float("-inf"), -0.0])),
    }
    optimizer = PortableOptimizer(
        groups=(
            {"lr": 0.1, "betas": (0.9, 0.95), "fused": None, "params": ["odd"]},
            {"lr": 0.2, "betas": (0.9, 0.95), "fused": None, "params": ["a.weight", "a.half"]},
        ),
        state={
            "odd": {"step": LazyTensor.of(torch.tensor(4.0)), "exp_avg": LazyTensor.of(torch.randn(3))},
            "a.weight": {"step": LazyTensor.of(torch.tensor(5.0)), "exp_avg": LazyTensor.of(torch.randn(3, 5))},
        },
        step=5,
    )
    return PortableState(models={"model": model}, optimizers={"optimizer": optimizer}, extra={"epoch": 3})

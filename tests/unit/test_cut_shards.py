"""Large shards stepped in pieces, against the same shards stepped whole: see Note [Pieces for the cache]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from shardrt.optim import cutting
from shardrt.optim.local import LocalOptimizer
from shardrt.optim.reach import _ELEMENTWISE

_SHAPES: Sequence[tuple[int, ...]] = [(37, 11), (1000,), (3,), (129,), (64,)]
_PIECE = 64
_OPTIONS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "AdamW": [{}, {"amsgrad": True, "maximize": True}, {"foreach": True}, {"fused": True}],
    "SGD": [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True}],
    "Adagrad": [{"lr_decay": 0.1}],
}
_CASES = [
    (one, {"lr": 0.01, **options}, dtype)
    for one in sorted(_ELEMENTWISE, key=lambda cls: cls.__name__)
    for options in _OPTIONS.get(one.__name__, [{}])
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
]


class Side:
    """The same shards, cut or not."""

    def __init__(self, cls: type[torch.optim.Optimizer], options: Mapping[str, Any], dtype: torch.dtype, cuts: bool):
        made = torch.Generator().manual_seed(0)
        self.cuts = cuts
        self.shards = [torch.nn.Parameter(torch.randn(shape, generator=made).to(dtype)) for shape in _SHAPES]
        self.local = LocalOptimizer(cls, [({}, self.shards[:2]), ({}, self.shards[2:])], options, joins=cuts)
        self.seen: list[int] = []
        own = self.local._step

        def counting() -> None:
            self.seen.append(sum(len(group["params"]) for group in self.local.inner.param_groups))
            own()

        self.local._step = counting

    def step(self, number: int, absent: Sequence[int] = ()) -> None:
        made = torch.Generator().manual_seed(100 + number)
        for index, shard in enumerate(self.shards):
            gradient = (torch.randn(shard.shape, generator=made) * 3).to(shard.dtype)
            shard.grad = None if index in absent else gradient
        with torch.no_grad():
            self.local.step()

    @property
    def state(self) -> list[dict[str, Any]]:
        return [dict(self.local.inner.state.get(shard, {})) for shard in self.shards]


def _sides(cls: type[torch.optim.Optimizer], options: Mapping[str, Any], dtype: torch.dtype) -> tuple[Side, Side]:
    return Side(cls, options, dtype, True), Side(cls, options, dtype, False)


def _check_alike(one: Side, other: Side) -> None:
    for mine, theirs in zip(one.shards, other.shards, strict=True):
        assert torch.equal(mine, theirs)
    assert one.local.inner.state.keys() <= set(one.shards)
    for own, others in zip(one.state, other.state, strict=True):
        assert own.keys() == others.keys()
        for key, value in own.items():
            if isinstance(value, torch.Tensor):
                assert value.shape == others[key].shape and torch.equal(value, others[key]), key
            else:
                assert value == others[key]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "PIECE", _PIECE)
    monkeypatch.setattr("shardrt.optim.flattening.LONGEST", 0)


@pytest.mark.parametrize(("cls", "options", "dtype"), _CASES, ids=lambda case: getattr(case, "__name__", str(case)))
def test_equals_steps_in_one_piece(
    cls: type[torch.optim.Optimizer], options: Mapping[str, Any], dtype: torch.dtype
) -> None:
    cut, whole = _sides(cls, options, dtype)
    for number, absent in enumerate([(), (), (0, 2), (), ()]):
        for side in (cut, whole):
            side.step(number, absent)
        _check_alike(cut, whole)
    sizes = [torch.Size(shape).numel() for shape in _SHAPES]
    pieces = sum(-(-size // _PIECE) for size in sizes if size >= 2 * _PIECE)
    has_state = any(isinstance(value, torch.Tensor) and value.dim() for value in cut.state[1].values())
    cuts = has_state and not options.get("foreach") and not options.get("fused")
    assert cut.seen[1] == (pieces + 2 if cuts else len(_SHAPES))
    assert cut.seen[0] == (cut.seen[1] if cls is torch.optim.Adagrad else len(_SHAPES))  # it has its state before


def test_state_may_be_replaced_changed_and_dropped_between_steps() -> None:
    cut, whole = _sides(torch.optim.AdamW, {"lr": 0.01}, torch.float32)

    def both(number: int) -> None:
        for side in (cut, whole):
            side.step(number)
        _check_alike(cut, whole)

    both(0)
    both(1)
    for side in (cut, whole):  # as loading does
        kept = side.local.inner.state[side.shards[1]]
        side.local.inner.state[side.shards[1]] = {key: value.clone() * 2 for key, value in kept.items()}
    both(2)
    for side in (cut, whole):  # as a user may
        side.local.inner.state[side.shards[0]]["exp_avg"].mul_(0.5)
        side.local.inner.state[side.shards[0]]["step"] += 7
    both(3)
    for side in (cut, whole):
        side.local.inner.state.clear()
    both(4)
    both(5)


class Replaces(torch.optim.Optimizer):
    """Puts other tensors in place of its state, and has something new to keep from the third step on."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                count = state.get("count", 0) + 1
                state["count"] = count
                state["mean"] = state.get("mean", torch.zeros_like(param)) * 0.5 + param.grad
                if count == 3:
                    state["late"] = param.grad.abs()
                    state["scale"] = torch.tensor(2.0)
                if count == 5:
                    del state["late"]
                param.sub_(state["mean"] * group["lr"])


def test_optimizers_may_replace_their_state() -> None:
    cut, whole = _sides(Replaces, {"lr": 0.1}, torch.float32)
    for number in range(6):
        for side in (cut, whole):
            side.step(number)
        _check_alike(cut, whole)
    assert cut.seen[-1] > len(_SHAPES)

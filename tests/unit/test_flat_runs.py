"""Shards stepped as one, against the same shards stepped one by one: see Note [Flat runs]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from shardrt.optim import flattening
from shardrt.optim.local import LocalOptimizer
from shardrt.optim.reach import _ELEMENTWISE, Reach, may_be_joined

_SHAPES: Sequence[tuple[int, ...]] = [(3, 5), (7,), (), (1,), (101,), (2, 2, 2), (33,), (), (16,), (13, 3), (5,), (64,)]
_OPTIONS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "AdamW": [{}, {"amsgrad": True, "maximize": True}, {"foreach": True}, {"fused": True}],
    "SGD": [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"momentum": 0.9, "fused": True}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True}],
    "Adagrad": [{"lr_decay": 0.1}, {"fused": True}],
}
_CASES = [
    (one, {"lr": 0.01, **options}, dtype)
    for one in sorted(_ELEMENTWISE, key=lambda cls: cls.__name__)
    for options in _OPTIONS.get(one.__name__, [{}])
    for dtype in (torch.float32, torch.float64)
]
_CASES.append((torch.optim.AdamW, {"lr": 0.01}, torch.bfloat16))


class Side:
    """Shards in one buffer, their gradients in another, in two groups that take turns of three shards each."""

    def __init__(self, cls: type[torch.optim.Optimizer], options: Mapping[str, Any], dtype: torch.dtype, joins: bool):
        numel = sum(torch.Size(shape).numel() for shape in _SHAPES)
        self.values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
        self.grads = torch.zeros_like(self.values)
        sizes = [torch.Size(shape).numel() for shape in _SHAPES]
        self.places = [p.view(s) for p, s in zip(self.grads.split(sizes), _SHAPES, strict=True)]
        self.shards = [torch.nn.Parameter(p.view(s)) for p, s in zip(self.values.split(sizes), _SHAPES, strict=True)]
        groups = [
            ({"weight_decay": decay}, [s for i, s in enumerate(self.shards) if (i // 6) % 2 == which])
            for which, decay in enumerate((0.0, 0.1))
        ]
        if cls is torch.optim.Rprop:
            groups = [({}, shards) for _, shards in groups]
        self.local = LocalOptimizer(cls, groups, options, joins=joins)

    def step(self, number: int, absent: Sequence[int] = (), only: Sequence[int] | None = None) -> None:
        made = torch.Generator().manual_seed(100 + number)
        self.grads.copy_(torch.randn(self.grads.numel(), generator=made) * 3)
        for index, (shard, place) in enumerate(zip(self.shards, self.places, strict=True)):
            shard.grad = None if index in absent else place
        with torch.no_grad():
            self.local.step(None if only is None else [self.shards[index] for index in only])

    def state(self) -> list[dict[str, Any]]:
        return [dict(self.local.inner.state.get(shard, {})) for shard in self.shards]


def _check_alike(one: Side, other: Side) -> None:
    assert torch.equal(one.values, other.values)
    assert len(one.local.inner.state) == len(other.local.inner.state)
    for mine, theirs in zip(one.state(), other.state(), strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            if isinstance(value, torch.Tensor):
                assert value.shape == theirs[key].shape and value.dtype == theirs[key].dtype
                assert torch.equal(value, theirs[key]), key
            else:
                assert value == theirs[key]


def _count_tensors(side: Side) -> list[int]:
    """Lets a side note how many tensors its optimizer is shown at each step."""
    seen: list[int] = []
    own = side.local._step

    def counting() -> None:
        seen.append(sum(p.grad is not None for group in side.local.inner.param_groups for p in group["params"]))
        own()

    side.local._step = counting
    return seen


@pytest.mark.parametrize(("cls", "options", "dtype"), _CASES, ids=lambda case: getattr(case, "__name__", str(case)))
def test_equals_steps_one_by_one(
    cls: type[torch.optim.Optimizer], options: Mapping[str, Any], dtype: torch.dtype
) -> None:
    flat, plain = (Side(cls, options, dtype, joins) for joins in (True, False))
    seen = _count_tensors(flat)
    for number in range(4):
        flat.step(number)
        plain.step(number)
        _check_alike(flat, plain)
    joined = dtype is not torch.bfloat16 and not options.get("fused")
    assert seen == [2 if joined else len(_SHAPES)] * 4
    # A gradient is missing: its run is stepped one by one, and what it counts differs from then on.
    for number, absent in enumerate([(2, 3), (), ()], start=4):
        flat.step(number, absent)
        plain.step(number, absent)
        _check_alike(flat, plain)
    assert not joined or seen[4] == 6 - 2 + 1
    # Bucket by bucket.
    for number in (7, 8):
        for only in ([0, 1, 2, 3], [4, 5, 6, 7, 8], [9, 10, 11]):
            flat.step(number, only=only)
            plain.step(number, only=only)
        _check_alike(flat, plain)
    assert not joined or seen[-1] == 1


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_state_may_be_replaced_changed_and_dropped_between_steps(cls: type[torch.optim.Optimizer]) -> None:
    options = {"lr": 0.01, **({"momentum": 0.9} if cls is torch.optim.SGD else {})}
    flat, plain = (Side(cls, options, torch.float32, joins) for joins in (True, False))
    seen = _count_tensors(flat)

    def both(number: int) -> None:
        for side in (flat, plain):
            side.step(number)
        _check_alike(flat, plain)

    both(0)
    for side in (flat, plain):  # as loading does
        side.local.inner.state.update(
            {
                shard: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kept.items()}
                for shard, kept in zip(side.shards, side.state(), strict=True)
            }
        )
    both(1)
    assert seen[-1] == 2
    for side in (flat, plain):  # as a user may
        for value in side.local.inner.state[side.shards[4]].values():
            value.mul_(0.5)
        key = next(key for key, value in side.state()[0].items() if value.dim())
        side.local.inner.state[side.shards[0]][key] = torch.full(_SHAPES[0], 0.25)
    both(2)
    both(3)
    if cls is not torch.optim.Adagrad:  # which makes its state once and for all
        for side in (flat, plain):
            side.local.inner.state.clear()
        both(4)
        both(5)
        assert seen[-1] == 2


def test_gradients_may_arrive_elsewhere_and_options_change() -> None:
    flat, plain = (Side(torch.optim.SGD, {"lr": 0.01}, torch.float32, joins) for joins in (True, False))
    seen = _count_tensors(flat)
    for number in range(6):
        for side in (flat, plain):
            if number == 2:
                side.grads = torch.zeros_like(side.grads)
                pieces = side.grads.split([shard.numel() for shard in side.shards])
                side.places = [p.view(s) for p, s in zip(pieces, _SHAPES, strict=True)]
            if number == 3:
                side.places[7] = side.places[7].clone()  # which stays what it is in all steps to come
            if number == 4:
                for group in side.local.inner.param_groups:
                    group["momentum"] = 0.9
            side.step(number)
        _check_alike(flat, plain)
    assert seen == [2, 2, 2, 7, 7, 7]


def test_runs_are_short_and_end_with_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flattening, "LONGEST", 60)
    flat, plain = (Side(torch.optim.AdamW, {"lr": 0.01}, torch.float32, joins) for joins in (True, False))
    seen = _count_tensors(flat)
    for number in range(3):
        flat.step(number)
        plain.step(number)
        _check_alike(flat, plain)
    # (3, 5) (7,) () (1,) | (101,) | (2, 2, 2)  and  (33,) () (16,) | (13, 3) (5,) | (64,)
    assert seen == [6] * 3


def test_only_what_is_known_is_joined() -> None:
    class Mine(torch.optim.AdamW):
        pass

    assert not may_be_joined(Mine, Reach.ELEMENT)
    assert not may_be_joined(torch.optim.AdamW, Reach.PARAMETER)

"""Where large units are divided."""

from __future__ import annotations

from typing import Any

import torch

from shardrt.sharding.dividing import Parts, divide
from shardrt.sharding.units import find_units


class Block(torch.nn.Module):
    """Two large layers, a small one, a list of two that is never called, and a weight that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 32)
        self.norm = torch.nn.LayerNorm(4)
        self.down = torch.nn.Linear(32, 16)
        self.both = torch.nn.ModuleList(torch.nn.Linear(16, 16, bias=False) for _ in range(2))
        self.tied = torch.nn.Linear(16, 16, bias=False)
        self.also = torch.nn.Linear(16, 16, bias=False)
        self.also.weight = self.tied.weight


def _divided(model: torch.nn.Module, most: int, units: Any = Block) -> dict[str, tuple[str | None, tuple[str, ...]]]:
    return {unit.name: (unit.within, unit.params) for unit in divide(model, find_units(model, units), most)}


def test_parts_are_the_large_layers() -> None:
    found = _divided(torch.nn.Sequential(Block(), Block()), 6_000)
    assert list(found) == ["", *(f"{n}{part}" for n in "01" for part in ("", ".up", ".down", ".both.0", ".both.1"))]
    assert found["0"] == (None, ("0.norm.weight", "0.norm.bias", "0.tied.weight"))
    assert found["0.up"] == ("0", ("0.up.weight", "0.up.bias"))
    assert found["1.both.1"] == ("1", ("1.both.1.weight",))


def test_small_units_and_the_root_stay_whole() -> None:
    assert list(_divided(torch.nn.Sequential(Block(), Block()), 20_000)) == ["", "0", "1"]
    assert list(_divided(Block(), 100, units=[])) == [""]


def test_layers_that_are_too_small_are_parts_together() -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(*(torch.nn.Sequential(*_small(4)) for _ in range(2))))
    found = _divided(model, 1_800, units=[model[0]])
    assert {name: within for name, (within, _) in found.items()} == {"": None, "0": None, "0.0": "0", "0.1": "0"}
    assert found["0"] == (None, ())
    assert len(found["0.0"][1]) == 4


def _small(count: int) -> list[torch.nn.Module]:
    return [torch.nn.Linear(8, 8, bias=False) for _ in range(count)]


def test_units_inside_units_keep_what_they_have() -> None:
    model = torch.nn.Sequential(Block())
    found = _divided(model, 3_000, units=[model[0], model[0].down])
    assert found["0.down"] == (None, ("0.down.weight", "0.down.bias"))
    assert found["0.up"][0] == "0"


def test_what_is_compiled_is_not_divided() -> None:
    model = torch.nn.Sequential(Block(), Block())
    model[0].up.compile(backend="eager")
    assert [name for name, (within, _) in _divided(model, 6_000).items() if within == "0"] == []


def test_a_part_follows_the_innermost_that_runs_around_it() -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False))
    inner.register_parameter("own", torch.nn.Parameter(torch.zeros(64)))
    model = torch.nn.Sequential(torch.nn.Sequential(inner, torch.nn.Linear(8, 8)))
    units = divide(model, find_units(model, [model[0]]), 500)
    names = [unit.name for unit in units]
    assert names == ["", "0", "0.0", "0.0.0", "0.0.1", "0.1"]
    parts = Parts(units)
    assert not parts.follow(3, [0]) and not parts.follow(1, [0, 1])  # the root is not around it, a unit follows nobody
    assert parts.follow(3, [0, 1, 2]) and parts.followed_by(2) == [2, 3]
    assert parts.follow(2, [0, 1]) and parts.followed_by(1) == [1, 2, 3]
    assert not parts.follows(4) and not parts.all_follow(1)
    parts.follow_all(1)
    assert parts.all_follow(1) and parts.unit_of(4) == 1

"""What blocks of uneven inputs are made of: values that travel, settings that are taken over, roll calls."""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import Any

import pytest
import torch

from shardrt.errors import HandshakeError
from shardrt.joining.rollcall import Roll, RollCall
from shardrt.joining.values import pack, unpack
from shardrt.testing import RankPool


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, "x", True, float("inf")],
        (0.9, (0.99, [None])),
        {3: 1, "milestones": Counter({5: 2}), "nested": {"tuple": [1]}},
        {},
        1e-300,
    ],
)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = unpack(json.loads(json.dumps(pack(value))))
    assert back == value and type(back) is type(value)


def test_tensors_come_back_with_their_dtype() -> None:
    back = unpack(pack(torch.tensor([1.5, 2.0], dtype=torch.float64)))
    assert back.dtype == torch.float64 and back.tolist() == [1.5, 2.0]


@pytest.mark.parametrize("value", [print, {"a": object()}, torch.zeros(5000)])
def test_what_cannot_travel_says_so(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^a "):
        pack(value)


class Table:
    """A communicator of threads that meet at a table: as much of one as a roll call needs."""

    world_size = 3

    def __init__(self, rank: int, shared: dict[str, Any], barrier: threading.Barrier) -> None:
        self.rank, self._shared, self._barrier = rank, shared, barrier

    def all_gather(self, buffer: torch.Tensor, splits: list[int]) -> Table:
        mine = list(torch.split(buffer, splits))[self.rank]
        self._shared[f"row {self.rank}"] = mine.clone()
        self._barrier.wait(20)
        buffer.copy_(torch.cat([self._shared[f"row {rank}"] for rank in range(3)]))
        self._barrier.wait(20)
        return self

    def broadcast(self, buffer: torch.Tensor, source: int) -> Table:
        if self.rank == source:
            self._shared["sent"] = buffer.clone()
        self._barrier.wait(20)
        buffer.copy_(self._shared["sent"])
        self._barrier.wait(20)
        return self

    def wait(self) -> None:
        pass


def call(events: list[str | None], settings: list[str]) -> list[Any]:
    shared: dict[str, Any] = {}
    barrier = threading.Barrier(3)
    found: list[Any] = [None] * 3

    def run(rank: int) -> None:
        try:
            found[rank] = RollCall(Table(rank, shared, barrier), "cpu").call(events[rank], settings=settings[rank])  # type: ignore[arg-type]
        except HandshakeError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_everybody_learns_who_is_active_and_what_comes() -> None:
    assert call(["step", "step", "step"], ["a"] * 3) == [Roll(active=(0, 1, 2), event="step")] * 3
    assert call([None, "step", None], ["a"] * 3) == [Roll(active=(1,), event="step")] * 3
    assert call([None] * 3, ["a"] * 3) == [Roll(active=())] * 3


def test_long_events_and_other_settings_come_from_the_first_active_rank() -> None:
    long = "clip " * 40 + "ü"
    assert call([None, long, long], ["old", "new", "new"]) == [Roll(active=(1, 2), event=long, settings="new")] * 3


def test_active_ranks_that_differ_in_settings_alone_are_left_to_the_step() -> None:
    assert call(["step", "step", None], ["a", "b", "a"]) == [Roll(active=(0, 1), event="step")] * 3


@pytest.mark.parametrize("other", ["clip", "s" * 60])
def test_active_ranks_must_be_about_to_do_the_same(other: str) -> None:
    first = "s" * 61 if len(other) > 50 else "step"
    for said in call([first, None, other], ["a"] * 3):
        assert "rank 0 is about to s" in said and "rank 2 to " in said


def takes_over() -> dict[str, Any]:
    """Options of all kinds, set on the rank that trains longest."""
    import shardrt

    weight = torch.nn.Parameter(torch.ones(4))
    with shardrt.Runtime(timeout=20) as rt:
        rate = torch.tensor(0.25)
        opt = rt.optimizer([("w", weight)], torch.optim.AdamW, lr=rate, betas=(0.9, 0.99))
        with rt.join(opt):
            for step in range([1, 3][rt.rank]):
                weight.sum().backward()
                opt.step()
                if step:
                    rate.fill_(0.5 * step)
                    opt.param_groups[0].update(betas=(0.5, 0.1 * step), note=None)
        group = opt.param_groups[0]
        return {
            "rate": rate.item(),
            "same": group["lr"] is rate,
            "betas": [type(group["betas"]).__name__, *group["betas"]],
            "noted": "note" in group,
            "weight": weight.tolist(),
        }


def test_options_are_taken_over_with_their_types(ranks: RankPool) -> None:
    first, second = ranks.run(takes_over, ranks=2)
    assert first == second == {**second, "rate": 1.0, "same": True, "betas": ["tuple", 0.5, 0.2], "noted": True}

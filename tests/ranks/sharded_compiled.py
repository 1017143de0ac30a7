"""torch.compile of units and of whole models, before and after they are sharded, beside the twin that is not."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import shardrt
from tests.ranks.sharded_scenarios import Net
from tests.ranks.twins import average_backward, batch, largest_difference, twins

WAYS = ("blocks", "in place", "module", "whole")


def _compiled(model: Any, what: str, backend: str) -> Any:
    if what == "whole":
        return torch.compile(model, backend=backend)
    if what == "module":
        model.compile(backend=backend)
    for at in range(len(model.blocks)):
        if what == "blocks":
            model.blocks[at].compile(backend=backend)
        elif what == "in place":
            model.blocks[at] = torch.compile(model.blocks[at], backend=backend)
    return model


def compiled(strategy: str, what: str, when: str, backend: str, schedule: str = "sync") -> float:
    """How far from the twin after three steps and an evaluation between."""
    import torch._dynamo

    torch._dynamo.reset()
    model, twin = twins(Net)
    with shardrt.Runtime(timeout=120, schedule=schedule) as rt:
        if when == "before":
            model = _compiled(model, what, backend)
        model, opt = rt.shard(model, torch.optim.AdamW, lr=1e-2, strategy=strategy)
        if when == "after":
            model = _compiled(model, what, backend)
        plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        for step in range(3):
            average_backward(twin, lambda rank: twin(batch(step, rank)).pow(2).mean(), rt.world_size)  # noqa: B023
            with torch.no_grad():
                model(batch(9, rt.rank))
            model(batch(step, rt.rank)).pow(2).mean().backward()
            for optimizer in (plain, opt):
                optimizer.step()
                optimizer.zero_grad()
        with rt.summon_full_params(model):
            return largest_difference(model.parameters(), twin.parameters())


def every_way(strategy: str, backend: str, schedule: str = "sync") -> dict[str, float]:
    """All of them, one after the other: the compiler is imported once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")  # of the compiler's own, which looks at all that tensors have
        found = {
            f"{what} {when}": compiled(strategy, what, when, backend, schedule)
            for what in WAYS
            for when in ("before", "after")
        }
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    return found

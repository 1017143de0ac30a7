"""torch's own Join context around DDP and our ZeroRedundancyOptimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from shardrt.compat import ZeroRedundancyOptimizer
from shardrt.testing import RankPool
from tests.ranks.twins import largest_difference, twins
from tests.ranks.uneven import Layers, average_over, loss_of

TOLERANCE = 5e-6
"""DDP divides each rank's gradient before it adds them."""


def in_torchs_join(batches: list[int], by_active: bool) -> dict[str, Any]:
    """As torch's documentation shows it, with a scheduler that steps per batch."""
    ours, theirs = twins(Layers)
    rank = torch.distributed.get_rank()
    ddp = DistributedDataParallel(ours, gradient_as_bucket_view=True)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-2)
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (zero, plain)]
    with Join([ddp, zero], divide_by_initial_world_size=not by_active):
        for step in range(batches[rank]):
            loss_of(ddp, step, rank).backward()
            zero.step()
            schedulers[0].step()
            zero.zero_grad()
    assert zero.sharded.gradients == "reduced"
    for step in range(max(batches)):
        active = [one for one, count in enumerate(batches) if step < count]
        losses = [lambda one=one: loss_of(theirs, step, one) for one in active]  # noqa: B023
        average_over(theirs, losses, len(active) if by_active else len(batches))
        plain.step()
        schedulers[1].step()
    return {
        "difference": largest_difference(ours.parameters(), theirs.parameters()),
        "moved": largest_difference(theirs.parameters(), twins(Layers)[0].parameters()),
        "steps": zero.sharded._steps,
    }


@pytest.mark.parametrize("by_active", [False, True])
def test_torchs_join_with_ddp_and_zero(ranks: RankPool, by_active: bool) -> None:
    for batches in ([3, 7, 7, 11], [0, 2, 4, 1]):
        found = ranks.run(in_torchs_join, ranks=4, batches=batches, by_active=by_active)
        assert max(one["difference"] for one in found) <= TOLERANCE
        assert all(one["moved"] > 0.01 and one["steps"] == max(batches) for one in found)


def joins_alone() -> int:
    model = torch.nn.Linear(2, 2)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    steps = 0
    with Join([zero]):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            zero.step()
            steps += 1
    return steps


def test_one_rank(ranks: RankPool) -> None:
    assert ranks.run(joins_alone, ranks=1) == [2]

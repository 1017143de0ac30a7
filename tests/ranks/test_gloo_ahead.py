"""Over Gloo's own messages those of the next operation are on their way before the one under way has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shardrt_gloo.communicator import GlooCommunicator

import shardrt
from shardrt.testing import RankPool

_ELEMENTS = 30_000


def _gloo(rt: shardrt.Runtime) -> GlooCommunicator:
    communicator: Any = rt.negotiate(["float32"])
    while not isinstance(communicator, GlooCommunicator):
        communicator = communicator.inner
    return communicator


def _watched(communicator: GlooCommunicator) -> list[str]:
    """What is posted and what has arrived, in the order in which it happens."""
    seen: list[str] = []
    post = communicator._messages.post

    def posting(operation: str, number: int, **messages: Any) -> Callable[[], None]:
        seen.append(f"posted {operation} {number}")
        finish = post(operation, number, **messages)

        def finishing() -> None:
            finish()
            seen.append(f"arrived {operation} {number}")

        return finishing

    communicator._messages.post = posting  # type: ignore[method-assign]
    return seen


def four_gathers() -> list[str]:
    with shardrt.Runtime(backend={"name": "gloo", "connections": "gloo"}, timeout=30) as rt:
        communicator = _gloo(rt)
        first = communicator._issued + 1
        seen = _watched(communicator)
        splits = [_ELEMENTS] * rt.world_size
        buffers = [torch.full((sum(splits),), float(10 * rt.rank + turn)) for turn in range(4)]
        if rt.rank == 1:
            time.sleep(0.5)  # so that nothing of rank 0's can arrive before it has issued all
        works = [communicator.all_gather(buffer, splits) for buffer in buffers]
        for work in works:
            work.wait()
        for turn, buffer in enumerate(buffers):
            owners = torch.arange(rt.world_size).repeat_interleave(_ELEMENTS)
            assert torch.equal(buffer, (10 * owners + turn).float())
        return [" ".join((*line.split()[:2], str(int(line.split()[2]) - first))) for line in seen]


@pytest.mark.parametrize("count", [2, 3])
def test_the_next_operation_is_posted_beside_the_one_under_way_and_no_more(ranks: RankPool, count: int) -> None:
    seen = ranks.run(four_gathers, ranks=count)[0]
    assert seen[:3] == ["posted all_gather 0", "posted all_gather 1", "arrived all_gather 0"]
    assert seen.index("posted all_gather 2") < seen.index("arrived all_gather 1")
    assert seen.index("posted all_gather 3") > seen.index("arrived all_gather 1")


def reductions_in_pieces(connections: str) -> float:
    """Small pieces are laid side by side in scratch, which operations that overlap must not share."""
    with shardrt.Runtime(backend={"name": "gloo", "chunk_mb": 0.05, "connections": connections}, timeout=30) as rt:
        communicator = _gloo(rt)
        worst = 0.0
        for turn in range(20):
            made = torch.Generator().manual_seed(turn)
            sizes = torch.randint(1, 3000, (rt.world_size, 4), generator=made).tolist()
            splits = [sum(row) for row in sizes]
            all_pieces = []
            for rank in range(rt.world_size):
                own = torch.Generator().manual_seed(100 * turn + rank)
                all_pieces.append([torch.randint(-9, 9, (n,), generator=own).float() for row in sizes for n in row])
            works, outputs = [], []
            for factor in range(4):
                pieces = [piece * (factor + 1) for piece in all_pieces[rt.rank]]
                outputs.append(torch.empty(splits[rt.rank]))
                works.append(communicator.reduce_scatter_pieces(pieces, splits, output=outputs[-1]))
            for work in works:
                work.wait()
            total = torch.stack([torch.cat(pieces) for pieces in all_pieces]).sum(0)
            expected = torch.split(total, splits)[rt.rank]
            for factor, output in enumerate(outputs):
                worst = max(worst, (output - expected * (factor + 1)).abs().max().item())
        return worst


@pytest.mark.parametrize("connections", ["own", "gloo"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_operations_that_overlap_share_no_scratch(ranks: RankPool, count: int, connections: str) -> None:
    assert ranks.run(reductions_in_pieces, ranks=count, connections=connections) == [0.0] * count


def after_it_was_closed() -> list[str]:
    with shardrt.Runtime(backend={"name": "gloo", "connections": "gloo"}, timeout=30) as rt:
        communicator = _gloo(rt)
    told = []
    for call in (communicator.barrier, lambda: communicator.all_reduce(torch.zeros(100_000))):
        with pytest.raises(shardrt.errors.CommunicationError) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_nothing_is_posted_on_a_closed_communicator(ranks: RankPool) -> None:
    for told in ranks.run(after_it_was_closed, ranks=2):
        assert all("on a communicator that was closed" in text for text in told)

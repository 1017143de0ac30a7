"""Over connections of their own ranks keep one order, whatever is issued; where there are none, Gloo's messages do."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
from shardrt_gloo import connecting
from shardrt_gloo.communicator import GlooCommunicator
from shardrt_gloo.streams import StreamsCommunicator

import shardrt
from shardrt.errors import CommunicationError
from shardrt.testing import RankPool


def _gloo(rt: shardrt.Runtime) -> GlooCommunicator:
    communicator: Any = rt.negotiate(["float32"])
    while not isinstance(communicator, GlooCommunicator):
        communicator = communicator.inner
    return communicator


def many_operations(drawn_from: int) -> float:
    """Whole and partial operations, large and small, issued all at once; some ranks are late."""
    with shardrt.Runtime(backend="gloo", timeout=60) as rt:
        communicator = _gloo(rt)
        assert isinstance(communicator, StreamsCommunicator)
        world, rank = rt.world_size, rt.rank
        drawn = torch.Generator().manual_seed(drawn_from)
        works, checks = [], []
        for number in range(40):
            kind = int(torch.randint(5, (), generator=drawn))
            numel = int(torch.randint(1, 200_000, (), generator=drawn))
            splits = [numel + (other + number) % 3 for other in range(world)]
            values = [torch.full((sum(splits),), float(100 * number + other)) for other in range(world)]
            mine = values[rank].clone()
            start = sum(splits[:rank])
            if kind == 0:
                output = torch.empty(splits[rank])
                works.append(communicator.reduce_scatter(mine, splits, output=output))
                checks.append((output, sum(values)[start : start + splits[rank]]))
            elif kind == 1:
                works.append(communicator.all_gather(mine, splits))
                owners = torch.arange(world).repeat_interleave(torch.tensor(splits))
                checks.append((mine, (100 * number + owners).float()))
            elif kind == 2:
                works.append(communicator.broadcast(mine, number % world))
                checks.append((mine, values[number % world]))
            else:
                part = mine[: 7 if kind == 3 else None].clone()
                works.append(communicator.all_reduce(part))
                checks.append((part, sum(values)[: part.numel()]))
            if torch.randint(8, (), generator=drawn) == 0 and rank == number % world:
                time.sleep(0.05)
        for work in works:
            work.wait()
        return max((found - expected).abs().max().item() for found, expected in checks)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_operations_issued_all_at_once_keep_one_order(ranks: RankPool, count: int, seed: int) -> None:
    assert ranks.run(many_operations, ranks=count, drawn_from=seed) == [0.0] * count


def different_calls() -> list[Any]:
    with shardrt.Runtime(backend="gloo", timeout=60) as rt:
        communicator = _gloo(rt)
        buffer = torch.zeros(5000 * rt.world_size)
        started = time.monotonic()
        with pytest.raises(CommunicationError) as caught:
            if rt.rank == 0:
                communicator.all_gather(buffer, [5000] * rt.world_size).wait()
            else:
                communicator.reduce_scatter(buffer, [5000] * rt.world_size).wait()
        return [str(caught.value), time.monotonic() - started]


def test_different_calls_are_named_at_once(ranks: RankPool) -> None:
    told = ranks.run(different_calls, ranks=2)
    assert all(seconds < 20 for _, seconds in told)  # the timeout is 60
    texts = [text for text, _ in told]
    assert any(
        "expected" in text and "all_gather" in text and "reduce_scatter" in text and "make the same calls" in text
        for text in texts
    )


def without_connections(rank_without: int) -> list[Any]:
    import torch.distributed as dist

    hidden = [] if dist.get_rank() == rank_without else None
    real = connecting.addresses_of_this_rank
    with (
        mock.patch.object(connecting, "addresses_of_this_rank", lambda: real() if hidden is None else hidden),
        shardrt.Runtime(backend="gloo", timeout=12) as rt,
    ):
        communicator = _gloo(rt)
        buffer = torch.full((4,), float(rt.rank + 1))
        communicator.all_reduce(buffer).wait()
        return [isinstance(communicator, StreamsCommunicator), buffer.tolist()]


@pytest.mark.parametrize(("count", "rank_without"), [(2, 0), (3, 1)])
def test_ranks_that_cannot_connect_use_messages_all_of_them(ranks: RankPool, count: int, rank_without: int) -> None:
    total = float(sum(range(count + 1)))
    found = ranks.run(without_connections, ranks=count, rank_without=rank_without)
    assert found == [[False, [total] * 4]] * count


def an_unknown_kind() -> str:
    asked = {"name": "gloo", "connections": "pigeons"}
    with pytest.raises(shardrt.errors.ConfigError) as caught, shardrt.Runtime(backend=asked, timeout=30) as rt:
        rt.negotiate(["float32"])
    return str(caught.value)


def test_an_unknown_kind_of_connections_is_refused(ranks: RankPool) -> None:
    for told in ranks.run(an_unknown_kind, ranks=2):
        assert "connections must be one of own, gloo, got 'pigeons'" in told

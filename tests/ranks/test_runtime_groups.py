"""Which ranks the runtime works with: a given subgroup, the default group, one it starts itself; and what it closes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardrt
from shardrt.testing import RankPool
from tests.ranks.twins import Odd, batch, compare


def in_subgroup() -> list[Any]:
    """Ranks 3 and 1, in that order, train together; group ranks differ from global ranks."""
    members = [1, 3]
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return []
    before = compare("adamw_foreach", 10, runtime={"process_group": group, "partitioner": "flat"})
    return [dist.get_rank(group), before["difference"], dist.is_initialized()]


def test_a_subgroup_whose_ranks_differ_from_global_ranks(ranks: RankPool) -> None:
    assert ranks.run(in_subgroup, ranks=4) == [[], [0, 0.0, True], [], [1, 0.0, True]]


def outside_subgroup() -> None:
    group = dist.new_group([0])
    shardrt.Runtime(process_group=group)


def test_a_rank_outside_the_group_is_told(ranks: RankPool) -> None:
    outcomes = ranks.outcomes(outside_subgroup, ranks=2)
    assert outcomes[0].ok
    assert (
        outcomes[1].error_type == "ConfigError" and "not a group this process belongs to" in outcomes[1].error_message
    )


def starts_and_closes() -> list[Any]:
    assert not dist.is_initialized()
    with shardrt.Runtime(timeout=20) as rt:
        started = dist.is_initialized()
        model = Odd()
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
        model(batch(0, rt.rank)).sum().backward()
        opt.step()
    again = compare("sgd", 3)["difference"]  # a second runtime in the same process, on the same launcher
    return [started, dist.is_initialized(), again]


def test_a_group_of_its_own_is_started_and_closed(ranks: RankPool) -> None:
    assert ranks.run(starts_and_closes, ranks=2, init=None) == [[True, False, 0.0]] * 2


def given_group_stays() -> bool:
    with shardrt.Runtime() as rt:
        rt.close()
        rt.close()
    assert dist.is_initialized()
    dist.barrier()
    return True


def test_a_given_group_is_left_alone(ranks: RankPool) -> None:
    assert ranks.run(given_group_stays, ranks=2) == [True, True]


def several_runtimes() -> list[float]:
    """Two runtimes on one process group at once, and DDP's collectives in between."""
    first, second = shardrt.Runtime(), shardrt.Runtime(partitioner="flat")
    models = [Odd(matrices_only=True) for _ in range(2)]
    ddp = torch.nn.parallel.DistributedDataParallel(models[0])
    opts = [
        first.optimizer(models[0].named_parameters(), torch.optim.SGD, gradients="reduced", lr=0.1),
        second.optimizer(models[1].named_parameters(), torch.optim.SGD, lr=0.1),
    ]
    for step in range(5):
        models[1](batch(step, first.rank)).sum().backward()
        ddp(batch(step, first.rank)).sum().backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    sums = [float(sum(p.detach().double().sum() for p in model.parameters())) for model in models]
    first.close()
    second.close()
    return sums


def test_several_runtimes_on_one_group(ranks: RankPool) -> None:
    found = ranks.run(several_runtimes, ranks=3)
    assert found[0] == found[1] == found[2]


def test_a_launcher_without_an_address_is_explained(ranks: RankPool) -> None:
    [outcome] = ranks.outcomes(build_alone, ranks=1, init=None, launcher=False, env={"WORLD_SIZE": "2", "RANK": "0"})
    assert outcome.error_type == "ConfigError"
    assert "MASTER_ADDR, MASTER_PORT are not set; start with torchrun" in outcome.error_message


def build_alone() -> str:
    with shardrt.Runtime() as rt:
        return rt.backend


def test_alone_without_a_launcher(ranks: RankPool) -> None:
    assert ranks.run(build_alone, ranks=1, init=None, launcher=False) == ["null"]


def backend_for_other_group() -> None:
    shardrt.Runtime(backend="nccl", device="cuda")


def test_a_backend_that_cannot_run_here_refuses_when_built(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(backend_for_other_group, ranks=2):
        assert outcome.error_type == "BackendUnavailableError"
        assert "backend 'nccl' (device cuda) is unavailable" in outcome.error_message
        assert "fix:" in outcome.error_message


def traffic(partitioner: str, steps: int) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Transformer(
        d_model=64, nhead=4, num_encoder_layers=2, num_decoder_layers=1, dim_feedforward=128, batch_first=True
    )
    with shardrt.Runtime(partitioner=partitioner, timeout=30) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3)
        before = rt.traffic.copy()
        for step in range(steps):
            x = batch(step, rt.rank, 64).view(1, 4, 64)
            model(x, x).sum().backward()
            opt.step()
            opt.zero_grad()
        moved = (rt.traffic - before).sent / steps
        nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
        return [moved, 2 * (rt.world_size - 1) / rt.world_size * nbytes, opt.state_bytes(), 2 * nbytes]


@pytest.mark.parametrize("partitioner", ["greedy", "flat", "bucket"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_traffic_is_that_of_one_all_reduce(ranks: RankPool, world_size: int, partitioner: str) -> None:
    found = ranks.run(traffic, ranks=world_size, partitioner=partitioner, steps=3)
    minimum = found[0][1]
    mean = sum(moved for moved, *_ in found) / world_size
    assert abs(mean - minimum) <= 0.01 * minimum
    if partitioner != "greedy":  # whole parameters balance the total, not each rank's part of it
        assert all(abs(moved - minimum) <= 0.01 * minimum for moved, *_ in found)
        assert all(abs(state - total / world_size) <= 0.01 * total / world_size for *_, state, total in found)

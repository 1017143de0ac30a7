"""Modules on the meta device become sharded ones without any rank ever having the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardrt
from shardrt.testing import RankPool
from tests.ranks.sharded_scenarios import Net
from tests.ranks.twins import average_backward, batch, largest_difference
from tests.ranks.zoo import ConvNet, TiedTransformer


def trained(strategy: str, build: str = "net", constants: bool = False) -> dict[str, Any]:
    kinds = {"net": Net, "tied": TiedTransformer, "conv": ConvNet}
    with shardrt.Runtime(timeout=30) as rt:
        torch.manual_seed(3 + rt.rank)  # rank 0's values are everybody's
        with torch.device("meta"):
            model = kinds[build]()

        def constant(module: torch.nn.Module) -> None:
            for param in module.parameters(recurse=False):
                torch.nn.init.constant_(param, 0.02)
            for buffer in module.buffers(recurse=False):
                buffer.zero_()

        units = torch.nn.Sequential if build == "conv" else None
        model, opt = rt.shard(
            model,
            torch.optim.SGD,
            lr=0.1,
            strategy=strategy,
            units=units,
            param_init_fn=constant if constants else _reset if build == "tied" else None,
        )
        twin = kinds[build]()
        start = rt.full_state_dict(model)
        twin.load_state_dict(start)
        plain = torch.optim.SGD(twin.parameters(), lr=0.1)
        for step in range(3):
            average_backward(twin, lambda rank: twin(batch(step, rank)).pow(2).mean(), rt.world_size)  # noqa: B023
            plain.step()
            plain.zero_grad()
            model(batch(step, rt.rank)).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
        with rt.summon_full_params(model):
            difference = largest_difference(model.parameters(), twin.parameters())
        values = torch.cat([value.float().reshape(-1) for value in start.values()])
        return {
            "difference": difference,
            "meta": any(param.is_meta for param in model.parameters()),
            "sum": float(values.sum()),
            "spread": float(values.std()),
        }


def _reset(module: torch.nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    elif hasattr(module, "_reset_parameters"):
        module._reset_parameters()
    else:
        for param in module.parameters(recurse=False):
            torch.nn.init.normal_(param, std=0.1)


@pytest.mark.parametrize("strategy", ["shard_optim", "full_shard"])
@pytest.mark.parametrize("build", ["net", "tied", "conv"])
def test_training_from_the_meta_device(ranks: RankPool, strategy: str, build: str) -> None:
    first, second = ranks.run(trained, ranks=2, strategy=strategy, build=build)
    assert first == second
    assert first["difference"] <= (5e-6 if build == "conv" else 0.0)
    assert not first["meta"] and first["spread"] > 1e-3


def test_the_users_function_initialises(ranks: RankPool) -> None:
    for value in ranks.run(trained, ranks=2, strategy="full_shard", constants=True):
        assert value["spread"] < 1e-6 and value["difference"] == 0.0


def refused() -> str:
    with shardrt.Runtime(timeout=30) as rt, torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), _Own())
        try:
            rt.shard(model, torch.optim.SGD, lr=0.1)
        except shardrt.errors.ConfigError as error:
            return str(error)
    return "done"


class _Own(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))


def test_a_module_that_cannot_initialise_itself_is_named(ranks: RankPool) -> None:
    for told in ranks.run(refused, ranks=2):
        assert "'1' (_Own)" in told and "param_init_fn" in told

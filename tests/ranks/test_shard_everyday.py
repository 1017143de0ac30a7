"""What people do around a training loop with a sharded module, and what they get wrong at first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardrt
from shardrt import compat
from shardrt.errors import ConfigError, ShardrtError
from shardrt.testing import RankPool
from tests.ranks.sharded_scenarios import Net
from tests.ranks.twins import average_backward, batch, largest_difference, twins


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """As most scripts have them: no decay but for matrices."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


def sent_in_a_step(**options: Any) -> int:
    """By this rank, once the order of the units is known."""
    with shardrt.Runtime(backend="gloo", timeout=30) as rt:
        model, opt = rt.shard(twins(Net)[0], torch.optim.SGD, lr=0.01, strategy="full_shard", **options)
        for step in range(2):
            before = rt.traffic.sent
            model(batch(step, rt.rank)).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
        return rt.traffic.sent - before


def test_the_unit_that_backward_begins_with_is_gathered_once(ranks: RankPool) -> None:
    every = ranks.run(sent_in_a_step, ranks=2, reshard_after_forward=True)
    usual = ranks.run(sent_in_a_step, ranks=2)
    last = sum(param.nbytes for param in Net().blocks[-1].parameters())
    told = 4  # the number of the unit goes along with each gather, two bytes for each rank
    assert sum(every) - sum(usual) == last + 2 * told


def with_groups(strategy: str, as_function: bool) -> dict[str, Any]:
    """Groups with options of their own, and a scheduler over them."""
    with shardrt.Runtime(timeout=30) as rt:
        model, twin = twins(Net)
        for one in (model, twin):
            next(one.parameters()).requires_grad_(False)
        given: Any = groups_of if as_function else groups_of(model)
        model, opt = rt.shard(model, torch.optim.AdamW, strategy=strategy, param_groups=given, lr=0.01)
        plain = torch.optim.AdamW(groups_of(twin), lr=0.01)
        schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, gamma=0.5) for one in (opt, plain)]
        for step in range(6):
            average_backward(twin, lambda rank, step=step: twin(batch(step, rank)).pow(2).mean(), rt.world_size)  # type: ignore[misc]
            model(batch(step, rt.rank)).pow(2).mean().backward()
            for one in (opt, plain, *schedulers):
                one.step()
            opt.zero_grad()
            plain.zero_grad()
        rates = [[group["lr"] for group in one.param_groups] for one in (opt, plain)]
        with rt.summon_full_params(model):
            return {"difference": largest_difference(model.parameters(), twin.parameters()), "rates": rates}


@pytest.mark.parametrize("as_function", [True, False])
@pytest.mark.parametrize("strategy", ["shard_optim", "full_shard"])
def test_groups_of_parameters(ranks: RankPool, strategy: str, as_function: bool) -> None:
    for found in ranks.run(with_groups, ranks=2, strategy=strategy, as_function=as_function):
        assert found["difference"] == 0.0
        assert found["rates"][0] == found["rates"][1]


def in_inference_mode(interface: str) -> list[Any]:
    """Evaluated and saved there first, between steps and last."""
    model, twin = twins(Net)
    rt = None
    if interface == "rt.shard":
        rt = shardrt.Runtime(timeout=30)
        model, opt = rt.shard(model, torch.optim.SGD, lr=0.1)
    else:
        model = compat.fully_shard(model)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[assignment]
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    worst = 0.0
    for step in range(3):
        with torch.inference_mode():
            worst = max(worst, float((model(batch(9, 0)) - twin(batch(9, 0))).abs().max()))
            state = model.state_dict()
        worst = max(worst, *(float((state[name] - value).abs().max()) for name, value in twin.state_dict().items()))
        average_backward(twin, lambda rank, step=step: twin(batch(step, rank)).pow(2).mean(), dist.get_world_size())  # type: ignore[misc]
        model(batch(step, dist.get_rank())).pow(2).mean().backward()
        for one in (opt, plain):
            one.step()
            one.zero_grad()
    if rt is not None:
        rt.close()
    return [worst]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("interface", ["rt.shard", "fully_shard"])
def test_inference_mode(ranks: RankPool, interface: str, world_size: int) -> None:
    for [worst] in ranks.run(in_inference_mode, ranks=world_size, interface=interface):
        assert worst <= (0.0 if world_size == 2 else 5e-6)


def partial_state(interface: str) -> list[list[str]]:
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    if interface in ("full_shard", "shard_grad_op"):
        with shardrt.Runtime(timeout=30) as rt:
            model, _ = rt.shard(model, torch.optim.SGD, lr=0.1, strategy=interface)
            found = model.load_state_dict({"1.weight": torch.zeros(8, 8), "more": torch.zeros(1)}, strict=False)
    else:
        wrap: Any = compat.fully_shard if interface == "fully_shard" else compat.FullyShardedDataParallel
        found = wrap(model).load_state_dict({"1.weight": torch.zeros(8, 8), "more": torch.zeros(1)}, strict=False)
    return [found.missing_keys, found.unexpected_keys]


@pytest.mark.parametrize("interface", ["full_shard", "shard_grad_op", "fully_shard", "wrapper"])
def test_keys_that_do_not_meet_are_returned(ranks: RankPool, interface: str) -> None:
    for found in ranks.run(partial_state, ranks=2, interface=interface):
        assert found == [["0.weight", "0.bias", "1.bias"], ["more"]]


def mistakes() -> list[str]:
    """Each is an error on every rank, and the next one is not the worse for it."""
    said = []
    for attempt in (_different_strategies, _misspelt, _params, _left_out, _of_another):
        with shardrt.Runtime(timeout=30) as rt:
            try:
                attempt(rt)
                said.append("")
            except ShardrtError as error:
                said.append(str(error))
    return said


def _different_strategies(rt: shardrt.Runtime) -> None:
    rt.shard(Net(), torch.optim.SGD, lr=0.1, strategy=["full_shard", "shard_grad_op"][rt.rank])


def _misspelt(rt: shardrt.Runtime) -> None:
    rt.shard(Net(), torch.optim.SGD, lr=0.1, stategy="full_shard")


def _params(rt: shardrt.Runtime) -> None:
    rt.shard(Net(), torch.optim.SGD, lr=0.1, params=[])


def _left_out(rt: shardrt.Runtime) -> None:
    rt.shard(Net(), torch.optim.SGD, lr=0.1, param_groups=lambda model: [{"params": list(model.parameters())[:-1]}])


def _of_another(rt: shardrt.Runtime) -> None:
    rt.shard(Net(), torch.optim.SGD, lr=0.1, param_groups=groups_of(Net()))


def test_mistakes(ranks: RankPool) -> None:
    for different, misspelt, params, left_out, of_another in ranks.run(mistakes, ranks=2):
        assert "strategy" in different and "full_shard" in different and "shard_grad_op" in different
        assert "did you mean 'strategy'?" in misspelt
        assert "did you mean 'param_groups'?" in params
        assert "in no group" in left_out
        assert "not of this module" in of_another


def differentiated_twice(strategy: str) -> str:
    with shardrt.Runtime(timeout=30) as rt:
        model, opt = rt.shard(Net(), torch.optim.SGD, lr=0.1, strategy=strategy)
        data = batch(0, 0).requires_grad_()
        try:
            output = model(data)
            [gradient] = torch.autograd.grad(output.sum(), data, create_graph=True)
            (output.pow(2).mean() + gradient.pow(2).sum()).backward()
        except ShardrtError as error:
            model(batch(0, 0)).sum().backward()  # goes on
            opt.step()
            return str(error)
        return ""


def test_a_graph_of_a_backward_needs_parameters_that_stay(ranks: RankPool) -> None:
    for said in ranks.run(differentiated_twice, ranks=2, strategy="full_shard"):
        assert "create_graph=True" in said and "shard_grad_op" in said
    assert ranks.run(differentiated_twice, ranks=2, strategy="shard_grad_op") == ["", ""]


def test_groups_alone() -> None:
    layer = torch.nn.Linear(2, 2)
    with shardrt.Runtime() as rt:
        _, opt = rt.shard(layer, torch.optim.SGD, lr=0.1, param_groups=[{"params": layer.parameters(), "lr": 0.5}])
        assert [group["lr"] for group in opt.param_groups] == [0.5]
        with pytest.raises(ConfigError, match="as optimizers of torch's take them"):
            rt.shard(torch.nn.Linear(2, 2), torch.optim.SGD, lr=0.1, param_groups=[3])

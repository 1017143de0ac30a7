"""Mixed precision: computing in bfloat16 from shards in float32 is what autograd does with casts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecision as TorchMixedPrecision
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardrt
from shardrt.testing import RankPool
from tests.ranks.sharded_scenarios import Net
from tests.ranks.twins import batch, largest_difference, twins
from tests.ranks.zoo import ConvNet

STRATEGIES = ("shard_optim", "shard_grad_op", "full_shard")
LOW = torch.bfloat16


def _twin_gradients(twin: torch.nn.Module, step: int, world_size: int) -> None:
    """Each rank's gradient through a cast to bfloat16, averaged in float32."""
    params = dict(twin.named_parameters())
    total: dict[str, torch.Tensor] = {}
    for rank in range(world_size):
        low = {name: param.detach().to(LOW).requires_grad_() for name, param in params.items()}
        output = torch.func.functional_call(twin, low, (batch(step, rank).to(LOW),))
        output.float().pow(2).mean().backward()
        for name, param in low.items():
            assert param.grad is not None
            total[name] = total.get(name, 0) + param.grad.float()
    for name, param in params.items():
        param.grad = total[name] / world_size


def mixed(strategy: str, reduce: str | None = "float32", keep_low: bool = False, steps: int = 8) -> dict[str, Any]:
    model, twin = twins(Net)
    seen: dict[str, Any] = {}
    with shardrt.Runtime(timeout=30) as rt:
        precision = shardrt.MixedPrecision(
            param_dtype=LOW,
            reduce_dtype=None if reduce is None else getattr(torch, reduce),
            keep_low_precision_grads=keep_low,
        )
        model, opt = rt.shard(model, torch.optim.AdamW, lr=1e-2, strategy=strategy, mixed_precision=precision)
        plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        model.blocks[1].register_forward_hook(  # type: ignore[union-attr, index]
            lambda module, args, output: seen.update(output=str(output.dtype), weight=str(module[0].weight.dtype))
        )
        for step in range(steps):
            _twin_gradients(twin, step, rt.world_size)
            plain.step()
            model(batch(step, rt.rank)).float().pow(2).mean().backward()
            seen["gradients"] = sorted({str(one.gradient.dtype) for one in opt._owned.values()})  # type: ignore[attr-defined]
            opt.step()
            opt.zero_grad()
        with rt.summon_full_params(model):
            seen["summoned"] = str(model.inlet.weight.dtype)  # type: ignore[union-attr]
            difference = largest_difference(model.parameters(), twin.parameters())
        state = rt.full_state_dict(model)
        return {
            **seen,
            "difference": difference,
            "state": largest_difference(state.values(), twin.state_dict().values()),
            "masters": sorted({str(stepped.dtype) for _, stepped in opt.owned()}),
        }


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_computing_low_and_stepping_high_equals_casts(ranks: RankPool, strategy: str, world_size: int) -> None:
    for value in ranks.run(mixed, ranks=world_size, strategy=strategy):
        assert value["difference"] == 0.0 and value["state"] == 0.0, value
        assert value["output"] == value["weight"] == "torch.bfloat16"
        assert value["summoned"] == "torch.float32"
        assert value["masters"] in (["torch.float32"], [])
        assert value["gradients"] in (["torch.float32"], [])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reducing_low(ranks: RankPool, strategy: str) -> None:
    for value in ranks.run(mixed, ranks=2, strategy=strategy, reduce=None, keep_low=True):
        assert value["difference"] < 0.05
        assert value["gradients"] in (["torch.bfloat16"], [])


def ignoring(strategy: str) -> dict[str, Any]:
    with shardrt.Runtime(timeout=30) as rt:
        torch.manual_seed(0)
        model, opt = rt.shard(
            ConvNet(),
            torch.optim.SGD,
            lr=0.1,
            strategy=strategy,
            units=torch.nn.Sequential,
            mixed_precision=TorchMixedPrecision(param_dtype=LOW, buffer_dtype=torch.float64),
        )
        seen: dict[str, str] = {}
        norm = model.stages[0][1]  # type: ignore[union-attr, index]
        norm.register_forward_hook(
            lambda module, args, output: seen.update(input=str(args[0].dtype), weight=str(module.weight.dtype))
        )
        output = model(batch(0, rt.rank))
        output.float().sum().backward()
        opt.step()
        return {**seen, "output": str(output.dtype), "running": str(norm.running_mean.dtype)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batch_norm_is_left_in_full_precision(ranks: RankPool, strategy: str) -> None:
    for value in ranks.run(ignoring, ranks=2, strategy=strategy):
        assert value == {
            "input": "torch.float32",
            "weight": "torch.float32",
            "output": "torch.bfloat16",
            "running": "torch.float32",
        }


def fsdp2_policy() -> dict[str, str]:
    with shardrt.Runtime(timeout=30) as rt:
        policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32, output_dtype=torch.float32)
        model, opt = rt.shard(Net(), torch.optim.SGD, lr=0.1, mixed_precision=policy)
        output = model(batch(0, rt.rank))
        output.sum().backward()
        opt.step()
        return {"output": str(output.dtype)}


def test_policies_of_fsdp2_are_taken(ranks: RankPool) -> None:
    assert ranks.run(fsdp2_policy, ranks=2) == [{"output": "torch.float32"}] * 2


def between(path: str, saved: str, loaded: str) -> float:
    with shardrt.Runtime(timeout=30) as rt:
        torch.manual_seed(0)
        options = {"lr": 1e-2, "mixed_precision": LOW}
        model, opt = rt.shard(Net(), torch.optim.AdamW, strategy=saved, **options)
        model(batch(0, rt.rank)).float().sum().backward()
        opt.step()
        rt.save(path, model=model, optimizer=opt)
        torch.manual_seed(1)
        fresh, again = rt.shard(Net(), torch.optim.AdamW, strategy=loaded, **options)
        rt.load(path, model=fresh, optimizer=again)
        worst = largest_difference(rt.full_state_dict(fresh).values(), rt.full_state_dict(model).values())
        with torch.no_grad():
            return worst + largest_difference([model(batch(1, 0))], [fresh(batch(1, 0))])


@pytest.mark.parametrize(("saved", "loaded"), [("full_shard", "shard_optim"), ("shard_grad_op", "full_shard")])
def test_checkpoints_hold_full_precision(ranks: RankPool, tmp_path: Any, saved: str, loaded: str) -> None:
    assert ranks.run(between, ranks=2, path=str(tmp_path), saved=saved, loaded=loaded) == [0.0, 0.0]

"""State of sharded modules: whole, in parts, in checkpoints, from one strategy to another."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import shardrt
from shardrt.testing import RankPool
from tests.ranks.sharded_twins import STRATEGIES
from tests.ranks.twins import average_backward, batch, largest_difference, twins
from tests.ranks.zoo import ZOO, TiedTransformer

NAMES = ("tied transformer", "convolutions", "adapters", "mixed dtypes")


def _trained(
    rt: shardrt.Runtime, name: str, strategy: str, steps: int = 3
) -> tuple[torch.nn.Module, Any, torch.nn.Module, torch.optim.Optimizer]:
    build, units = ZOO[name]
    model, twin = twins(build)
    model, opt = rt.shard(model, torch.optim.AdamW, lr=1e-2, strategy=strategy, units=units)
    plain = torch.optim.AdamW(twin.named_parameters(), lr=1e-2)
    for step in range(steps):
        average_backward(twin, lambda rank: twin(batch(step, rank)).pow(2).mean(), rt.world_size)  # noqa: B023
        plain.step()
        plain.zero_grad()
        model(batch(step, rt.rank)).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
    return model, opt, twin, plain


def _difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], params: set[str]) -> float:
    assert one.keys() == other.keys()
    return largest_difference([one[name] for name in params], [other[name] for name in params])


def full_states(name: str, strategy: str) -> dict[str, Any]:
    with shardrt.Runtime(timeout=30) as rt:
        model, opt, twin, plain = _trained(rt, name, strategy)
        params = {key for key, _ in twin.named_parameters()}
        state = rt.full_state_dict(model)
        first = rt.full_state_dict(model, rank0_only=True, offload_to_cpu=True)
        ours, theirs = rt.full_state_dict(opt), plain.state_dict()
        moments = [
            (ours["state"][number][key], values[key])
            for number, values in theirs["state"].items()
            for key in ("exp_avg", "exp_avg_sq")
        ]
        build, units = ZOO[name]
        torch.manual_seed(99)
        fresh, again = rt.shard(build(), torch.optim.AdamW, lr=1e-2, strategy=strategy, units=units)
        found = {}
        for way, given, options in (
            ("whole", state, {}),
            ("first rank's", first if rt.rank == 0 else None, {"rank0_only": True}),
            ("parts", rt.sharded_state_dict(model), {}),
        ):
            rt.load_state_dict(fresh, given, **options)
            found[way] = _difference(rt.full_state_dict(fresh), state, params)
            rt.load_state_dict(fresh, {key: torch.zeros_like(value) for key, value in state.items()})
        del again
        return {
            "whole": _difference(state, twin.state_dict(), params),
            "first": sorted(first) == sorted(state) if rt.rank == 0 else first == {},
            "moments": largest_difference(*zip(*moments, strict=True)),
            "tied": all(
                (state[one] is state[other]) == (twin.state_dict()[one].data_ptr() == value.data_ptr())
                for one, (other, value) in itertools.product(state, twin.state_dict().items())
                if value.numel() and state[one].numel()
            ),
            "loaded": found,
        }


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NAMES)
def test_whole_states_are_the_unsharded_ones_and_load_again(ranks: RankPool, name: str, strategy: str) -> None:
    tolerance = 5e-6 if name == "convolutions" else 0.0
    for value in ranks.run(full_states, ranks=2, name=name, strategy=strategy):
        assert value["whole"] <= tolerance and value["moments"] <= tolerance
        assert value["first"] and value["tied"]
        assert set(value["loaded"].values()) == {0.0}, value


def save_and_load(path: str, saved: str, loaded: str, name: str) -> dict[str, Any]:
    build, units = ZOO[name]
    with shardrt.Runtime(timeout=30) as rt:
        model, opt, twin, _ = _trained(rt, name, saved)
        params = {key for key, _ in twin.named_parameters()}
        rt.save(path, model=model, optimizer=opt)
        torch.manual_seed(5)
        fresh, again = rt.shard(build(), torch.optim.AdamW, lr=0.5, strategy=loaded, units=units)
        rt.load(path, model=fresh, optimizer=again)
        before, after = rt.full_state_dict(opt), rt.full_state_dict(again)
        moments = [
            (after["state"][number][key], values[key])
            for number, values in before["state"].items()
            for key in ("exp_avg", "exp_avg_sq", "step")
        ]
        model_difference = _difference(rt.full_state_dict(fresh), rt.full_state_dict(model), params)
        for one, optimizer in ((model, opt), (fresh, again)):
            one(batch(77, rt.rank)).pow(2).mean().backward()
            optimizer.step()
        return {
            "model": model_difference,
            "moments": largest_difference(*zip(*moments, strict=True)),
            "next": _difference(rt.full_state_dict(fresh), rt.full_state_dict(model), params),
        }


@pytest.mark.parametrize(("saved", "loaded"), list(itertools.product(STRATEGIES, STRATEGIES)))
def test_checkpoints_go_from_any_strategy_to_any_other(
    ranks: RankPool, tmp_path: Path, saved: str, loaded: str
) -> None:
    arguments = {"path": str(tmp_path), "saved": saved, "loaded": loaded, "name": "adapters"}
    for value in ranks.run(save_and_load, ranks=2, **arguments):
        assert value == {"model": 0.0, "moments": 0.0, "next": 0.0}


def own_calls(strategy: str, mixed: bool) -> list[float]:
    options = {"mixed_precision": torch.bfloat16} if mixed else {}
    with shardrt.Runtime(timeout=30) as rt:
        torch.manual_seed(0)
        model, opt = rt.shard(TiedTransformer(), torch.optim.AdamW, lr=1e-2, strategy=strategy, **options)
        model(batch(0, rt.rank)).float().pow(2).mean().backward()
        opt.step()
        state = model.state_dict()
        found = [float(sorted(state) == sorted(TiedTransformer().state_dict()))]
        found.append(largest_difference(state.values(), rt.full_state_dict(model).values()))
        around = torch.nn.ModuleDict({"inner": model})
        found.append(largest_difference(around.state_dict().values(), state.values()))
        with rt.state_dict_type(model, "full", rank0_only=True):
            found.append(float(bool(model.state_dict()) == (rt.rank == 0)))
        model.load_state_dict({name: torch.full_like(value, 0.5) for name, value in state.items()})
        found.append(float(all((value == 0.5).all() for value in model.state_dict().values())))
        return found


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("strategy", ["shard_grad_op", "full_shard"])
def test_a_sharded_module_answers_for_its_state_itself(ranks: RankPool, strategy: str, mixed: bool) -> None:
    assert ranks.run(own_calls, ranks=2, strategy=strategy, mixed=mixed) == [[1.0, 0.0, 0.0, 1.0, 1.0]] * 2

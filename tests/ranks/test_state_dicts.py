"""State dicts: whole ones in torch's own format both ways, parts of one rank, and who may ask for which."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, ShardedOptimStateDictConfig, StateDictType

import shardrt
from shardrt.bench.memory import peak_memory
from shardrt.errors import StateError
from shardrt.testing import RankPool
from tests.ranks.keeping import Run, bits, groups
from tests.ranks.twins import ELEMENTWISE, OPTIMIZERS, Odd, average_backward, batch, largest_difference, twins


def same(one: Any, other: Any) -> bool:
    """Whether two trees are equal to the last bit."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and bits(one) == bits(other)
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def pair(rt: shardrt.Runtime, optimizer: str) -> tuple[Any, Any, Any, Any]:
    """A sharded optimizer and its plain twin, three steps on."""
    optimizer_class, defaults = OPTIMIZERS[optimizer]
    model, twin = twins(lambda: Odd(matrices_only=optimizer == "muon"))
    opt = rt.optimizer(model.named_parameters(), optimizer_class, **defaults)
    plain = optimizer_class(twin.named_parameters(), **defaults)
    advance(rt, model, opt, twin, plain, 0, 3)
    return model, opt, twin, plain


def advance(rt: shardrt.Runtime, model: Any, opt: Any, twin: Any, plain: Any, first: int, last: int) -> None:
    for step in range(first, last):
        average_backward(twin, lambda rank: twin(batch(step, rank)).pow(2).mean(), rt.world_size)  # noqa: B023
        plain.step()
        plain.zero_grad()
        model(batch(step, rt.rank)).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()


def round_trip(optimizer: str, partitioner: Any) -> dict[str, Any]:
    """Ours to torch and torch's to ours, each into an optimizer made anew, then three steps more."""
    optimizer_class, defaults = OPTIMIZERS[optimizer]
    with shardrt.Runtime(partitioner=partitioner, timeout=30) as rt:
        model, opt, twin, plain = pair(rt, optimizer)
        ours, theirs = rt.full_state_dict(opt), plain.state_dict()
        equal = same(ours["state"], theirs["state"]) and [g["lr"] for g in ours["param_groups"]] == [
            g["lr"] for g in theirs["param_groups"]
        ]
        kept = copy.deepcopy(theirs)
        changed_options = {**defaults, "lr": 123.0}
        fresh_plain = optimizer_class(twin.named_parameters(), **changed_options)
        fresh_plain.load_state_dict(ours)
        del opt
        fresh = rt.optimizer(model.named_parameters(), optimizer_class, **changed_options)
        fresh.load_state_dict(theirs)
        advance(rt, model, fresh, twin, fresh_plain, 3, 6)
        return {
            "equal": equal,
            "untouched": same(kept["param_groups"], theirs["param_groups"]) and same(kept["state"], theirs["state"]),
            "difference": largest_difference(model.parameters(), twin.parameters()),
            "steps": fresh.steps_taken,
        }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("world_size", "partitioner"), [(1, "greedy"), (2, "flat"), (3, "greedy")])
def test_whole_state_goes_to_torch_and_back(ranks: RankPool, optimizer: str, world_size: int, partitioner: str) -> None:
    if partitioner == "flat" and optimizer not in ELEMENTWISE:
        partitioner = "greedy"
    for one in ranks.run(round_trip, ranks=world_size, optimizer=optimizer, partitioner=partitioner):
        assert one["equal"] or world_size > 2
        assert one["untouched"]
        assert one["difference"] <= (0.0 if world_size <= 2 else 2e-6)


def from_torch_zero() -> dict[str, Any]:
    """The dict that torch's own ZeroRedundancyOptimizer consolidates, loaded into ours, and the other way round."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # importing torch's compiles what it says not to compile
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model, twin = twins(lambda: torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)))
    zero = ZeroRedundancyOptimizer(twin.parameters(), torch.optim.AdamW, lr=1e-2)
    with shardrt.Runtime(partitioner="flat", timeout=30) as rt:
        opt = rt.optimizer(model.parameters(), torch.optim.AdamW, lr=0.5)
        for step in range(3):
            average_backward(twin, lambda rank: twin(batch(step, rank)).pow(2).mean(), rt.world_size)  # noqa: B023
            zero.step()
            zero.zero_grad()
        zero.consolidate_state_dict(to=0)
        given = zero.state_dict() if rt.rank == 0 else None
        rt.load_state_dict(opt, given, rank0_only=True)
        rt.load_state_dict(model, twin.state_dict() if rt.rank == 0 else None, rank0_only=True)
        advance(rt, model, opt, twin, zero, 3, 6)
        # torch's takes apart the dict it is given, so it gets one of its own.
        zero.load_state_dict(copy.deepcopy(rt.full_state_dict(opt)))
        advance(rt, model, opt, twin, zero, 6, 9)
        return {
            "difference": largest_difference(model.parameters(), twin.parameters()),
            "lr": opt.param_groups[0]["lr"],
        }


def test_torch_zeros_dict_goes_both_ways(ranks: RankPool) -> None:
    for one in ranks.run(from_torch_zero, ranks=2):
        assert one == {"difference": 0.0, "lr": 1e-2}


def only_the_first() -> dict[str, Any]:
    with shardrt.Runtime(partitioner="flat", timeout=30) as rt:
        run = Run(rt)
        run.train(0, 3)
        whole = rt.full_state_dict(run.opt)
        first = rt.full_state_dict(run.opt, rank0_only=True, offload_to_cpu=True)
        model = rt.full_state_dict(run.model, rank0_only=True)
        state = {**run.model.state_dict()}
        shares = {
            value.data_ptr() == run.model.state_dict()[name].data_ptr() and value.numel() > 0
            for name, value in model.items()
        }
        equal = same(first, whole) if rt.rank == 0 else first == {}
        return {"equal": equal, "model": len(model), "all": len(state), "shares": sorted(shares)}


def test_a_whole_state_may_be_for_the_first_rank_alone(ranks: RankPool) -> None:
    first, *others = ranks.run(only_the_first, ranks=3)
    assert first["equal"] and first["model"] == first["all"] and first["shares"] == [False]
    assert all(one["equal"] and one["model"] == 0 for one in others)


def parts(path_of_first: str = "flat", other: str = "greedy") -> dict[str, Any]:
    """Parts of all ranks, each rank handing over its own, into an optimizer with another partition."""
    with shardrt.Runtime(partitioner=path_of_first, timeout=30) as rt:
        run = Run(rt)
        run.train(0, 3)
        expected = run.digests()
        kinds = {}
        with rt.state_dict_type(run.opt, StateDictType.SHARDED_STATE_DICT, ShardedOptimStateDictConfig()):
            mine = copy.deepcopy(run.opt.state_dict())
        with rt.state_dict_type(run.opt, "local"):
            local = copy.deepcopy(run.opt.state_dict())
        with rt.state_dict_type(run.model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
            kinds["full model"] = len(rt.state_dict(run.model))
            kinds["its own"] = len(run.model.state_dict())
        with rt.state_dict_type(run.model, StateDictType.SHARDED_STATE_DICT):
            kinds["part of its own"] = run.model.state_dict()["shardrt"]["kind"]
        kinds["as ever"] = "odd.out.bias" in run.model.state_dict()
        model = copy.deepcopy(rt.sharded_state_dict(run.model))
        kinds |= {"sharded": mine["shardrt"]["kind"], "local": local["shardrt"]["kind"]}
        elements = sum(s["stop"] - s["start"] for entry in mine["state"].values() for s in entry["shards"])
        run.train(3, 5)
        rt.load_state_dict(run.model, model)
        rt.load_state_dict(run.opt, local)
        again = run.digests() == expected
    with shardrt.Runtime(partitioner=other, timeout=30) as rt:
        run = Run(rt)
        rt.load_state_dict(run.model, model)
        rt.load_state_dict(run.opt, mine)
        resharded = run.digests() == expected
        refused = ""
        try:
            rt.load_state_dict(run.opt, local)
        except StateError as error:
            refused = str(error)
        return {"again": again, "resharded": resharded, "elements": elements, "kinds": kinds, "refused": refused}


def test_parts_fit_any_partition_and_local_ones_only_their_own(ranks: RankPool) -> None:
    found = ranks.run(parts, ranks=3)
    assert all(one["again"] and one["resharded"] for one in found)
    assert len({one["elements"] for one in found}) > 1 or found[0]["elements"] > 0
    own = {"full model": 0, "its own": 0, "part of its own": "sharded", "as ever": True}
    assert found[1]["kinds"] == {**own, "sharded": "sharded", "local": "local"}
    assert all("fits only where it was made" in one["refused"] for one in found)


def alone_asks() -> dict[str, Any]:
    with shardrt.Runtime(timeout=5) as rt:
        run = Run(rt)
        run.train(0, 2)
        answer = {}
        if rt.rank == 1:
            answer = {
                "sharded": len(rt.sharded_state_dict(run.opt)["state"]),
                "model": len(rt.sharded_state_dict(run.model)["state"]),
                "local": len(rt.local_state_dict(run.opt)["state"]),
            }
        run.train(2, 3)
        dist.barrier()
        return answer


def test_one_rank_alone_may_ask_for_its_part(ranks: RankPool) -> None:
    _, asked = ranks.run(alone_asks, ranks=2)
    assert asked["sharded"] and asked["local"] and asked["model"]


def one_part_missing() -> None:
    with shardrt.Runtime(timeout=10) as rt:
        run = Run(rt)
        run.train(0, 2)
        mine = rt.sharded_state_dict(run.opt)
        lost = {**mine, "state": dict(list(mine["state"].items())[1:])}
        rt.load_state_dict(run.opt, lost)


def test_parts_that_are_not_all_there_are_refused_everywhere(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(one_part_missing, ranks=2):
        assert outcome.error_type == "StateError"
        assert "hand over those of all ranks" in outcome.error_message


def misfit(kind: str) -> dict[str, Any]:
    with shardrt.Runtime(partitioner="flat", timeout=10) as rt:
        run = Run(rt)
        run.train(0, 2)
        before = run.digests()
        state = rt.full_state_dict(run.opt)
        if kind == "groups":
            state["param_groups"].pop()
        elif kind == "parameters":
            state["param_groups"][0]["params"].pop()
        elif kind == "shape":
            number = next(iter(state["state"]))
            state["state"][number]["exp_avg"] = torch.zeros(3)
        elif kind == "one rank" and rt.rank == 1:
            state = {"nonsense": 1}
        elif kind == "different" and rt.rank == 1:
            state["param_groups"][0]["lr"] = 7.0
        elif kind == "model":
            model = rt.full_state_dict(run.model)
            model["surprise"] = model.pop("odd.scale")
        try:
            rt.load_state_dict(run.model if kind == "model" else run.opt, model if kind == "model" else state)
        except shardrt.ShardrtError as error:
            return {"error": f"{type(error).__name__}: {error}", "unchanged": run.digests() == before}
        return {"error": "", "unchanged": True}


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("groups", "the state dict has 1 parameter groups, this optimizer 2"),
        ("parameters", "in the state dict and"),
        ("shape", "has shape [3]"),
        ("one rank", "'state' and 'param_groups'"),
        ("different", "rank 1 has 7.0"),
        ("model", "missing 'odd.scale', unexpected 'surprise'"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(ranks: RankPool, kind: str, told: str) -> None:
    for one in ranks.run(misfit, ranks=2, kind=kind):
        assert told in one["error"]
        assert one["unchanged"]


def test_a_plain_model_names_what_an_unnamed_optimizer_holds(tmp_path: Any) -> None:
    with shardrt.Runtime() as rt:
        model = torch.nn.Linear(3, 2)
        opt = rt.optimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        model(torch.ones(1, 3)).sum().backward()
        opt.step()
        rt.save(tmp_path, model=model, optimizer=opt)
        named = rt.optimizer(groups(model), torch.optim.SGD, lr=0.5, momentum=0.5)
        with pytest.raises(StateError, match="build the same groups"):
            rt.load(tmp_path, model=model, optimizer=named)
        again = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.5, momentum=0.5)
        rt.load(tmp_path, model=model, optimizer=again)
        assert same(again.state[model.weight], opt.state[model.weight])
        assert again.param_groups[0]["lr"] == 0.1


def peak_while_consolidating(megabytes: int) -> dict[str, float]:
    """How far memory goes up on each rank while the first one gets the whole state."""
    sizes = [megabytes * 2**20 // 4 // 8] * 8
    params = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    with shardrt.Runtime(partitioner="flat", timeout=60) as rt:
        opt = rt.optimizer(params, torch.optim.SGD, lr=0.1, momentum=0.9)
        for param in params:
            param.grad = torch.ones_like(param)
        opt.step()
        opt.zero_grad()
        dist.barrier()
        with peak_memory() as peak:
            state = rt.full_state_dict(opt, rank0_only=True, offload_to_cpu=True)
        return {"grown": (peak.nbytes or 0) / 2**20, "kept": len(state)}


def test_only_the_rank_that_asked_holds_the_whole(ranks: RankPool) -> None:
    first, *others = ranks.run(peak_while_consolidating, ranks=3, megabytes=192)
    assert first["grown"] > 190 and first["kept"]
    for one in others:
        assert one["grown"] < 192 / 3 + 16 and not one["kept"]

"""Scripts written for torch's FSDP run with our import, and train what the unsharded twin trains."""

from __future__ import annotations

import copy
import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

import shardrt.compat
from shardrt.compat import FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from shardrt.errors import ShardrtError
from shardrt.testing import RankPool
from tests.ranks.fsdp_scripts import LOOPS, Script, plain_loop, run_loop, wrapped
from tests.ranks.sharded_scenarios import Net
from tests.ranks.twins import batch, largest_difference
from tests.ranks.zoo import ZOO

FSDP = FullyShardedDataParallel


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("name", LOOPS)
def test_loop(ranks: RankPool, name: str, strategy: str) -> None:
    for value in ranks.run(run_loop, ranks=2, name=name, strategy=strategy):
        assert value["difference"] <= (1e-6 if name in ("accumulated", "clipped", "clipped by torch") else 0.0), value
        if "clipped" in name:
            assert value["returned"] < 1e-5
        if name == "GradScaler":
            assert value["returned"] == [2.0**5, 2.0**5]


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_hybrid(ranks: RankPool, strategy: str) -> None:
    for value in ranks.run(run_loop, ranks=4, name="clipped by torch", strategy=strategy):
        assert value["difference"] <= 1e-6


WRAPS: dict[str, Any] = {
    "size": lambda model: FSDP(
        model, auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    ),
    "classes": lambda model: FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={torch.nn.Sequential}),
        forward_prefetch=True,
        limit_all_gathers=False,
        use_orig_params=True,
        device_id=torch.device("cpu"),
        sync_module_states=True,
    ),
    "no prefetch": lambda model: wrapped(model, backward_prefetch=None),
    "post": lambda model: wrapped(model, backward_prefetch=BackwardPrefetch.BACKWARD_POST),
    "offload": lambda model: wrapped(model, cpu_offload=CPUOffload(offload_params=True)),
    "by hand": lambda model: by_hand(model),
    "fully_shard": lambda model: in_parts(model),
    "fully_shard, kept": lambda model: in_parts(model, reshard_after_forward=False),
    "fully_shard, a number": lambda model: in_parts(model, reshard_after_forward=2),
    "fully_shard at once": lambda model: fully_shard(model),
}


def by_hand(model: Any) -> FullyShardedDataParallel:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = FSDP(block)
    return FSDP(model)


def in_parts(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model)


def wrapped_so(name: str) -> float:
    script = Script(WRAPS[name])
    plain_loop(script)
    return script.difference()


@pytest.mark.parametrize("name", WRAPS)
def test_wrapping(ranks: RankPool, name: str) -> None:
    assert ranks.run(wrapped_so, ranks=2, name=name) == [0.0, 0.0]


def zoo_with(name: str, strategy: str) -> float:
    build, units = ZOO[name]
    policy = None if units is None else (lambda module: isinstance(module, units))
    script = Script(
        lambda model: FSDP(model, auto_wrap_policy=policy, sharding_strategy=ShardingStrategy[strategy]),
        optimizer=torch.optim.SGD,
        lr=0.05,
        momentum=0.9,
        build=build,
    )
    plain_loop(script)
    names = [name for name, _ in script.twin.named_parameters()]
    ours, theirs = script.model.state_dict(), script.twin.state_dict()
    return largest_difference([ours[name] for name in names], [theirs[name] for name in names])


@pytest.mark.parametrize("name", ZOO)
def test_zoo(ranks: RankPool, name: str) -> None:
    for difference in ranks.run(zoo_with, ranks=3, name=name, strategy="FULL_SHARD"):
        assert difference <= (2.0**-8 if name == "mixed dtypes" else 1e-6)


def states() -> dict[str, Any]:
    script = Script(lambda model: wrapped(model))
    plain_loop(script)
    model, opt = script.model, script.opt
    found: dict[str, Any] = {}
    full = FSDP.optim_state_dict(model, opt)
    found["names"] = sorted(full["state"]) == sorted(name for name, _ in script.twin.named_parameters())
    plain = script.plain.state_dict()["state"]
    found["exp_avg"] = max(
        largest_difference([full["state"][name]["exp_avg"]], [plain[number]["exp_avg"]])
        for number, (name, _) in enumerate(script.twin.named_parameters())
    )
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(rank0_only=True),
    ):
        saved, on_first = model.state_dict(), FSDP.optim_state_dict(model, opt)
    found["rank0_only"] = (bool(saved), bool(on_first)) == ((dist.get_rank() == 0,) * 2)
    with FSDP.state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    ):
        sharded, optimizer_part = model.state_dict(), FSDP.optim_state_dict(model, opt)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        local, local_part = model.state_dict(), FSDP.optim_state_dict(model, opt)
    whole = model.state_dict()
    for how, state, part in (("full", whole, full), ("sharded", sharded, optimizer_part), ("local", local, local_part)):
        other = Script(lambda fresh: wrapped(fresh))
        other.model.load_state_dict(state)
        other.opt.load_state_dict(FSDP.optim_state_dict_to_load(other.model, other.opt, part))
        other.twin.load_state_dict(script.twin.state_dict())
        other.plain.load_state_dict(copy.deepcopy(script.plain.state_dict()))
        other.backward(77)
        other.step()
        found[how] = other.difference()
    other = Script(lambda fresh: wrapped(fresh))
    other.model.load_state_dict(whole)
    other.opt.load_state_dict(FSDP.scatter_full_optim_state_dict(on_first or None, other.model, optim=other.opt))
    other.twin.load_state_dict(script.twin.state_dict())
    other.plain.load_state_dict(copy.deepcopy(script.plain.state_dict()))
    other.backward(77)
    other.step()
    found["scattered"] = other.difference()
    return found


def test_state(ranks: RankPool) -> None:
    for found in ranks.run(states, ranks=2):
        assert found == {
            "names": True,
            "exp_avg": 0.0,
            "rank0_only": True,
            "full": 0.0,
            "sharded": 0.0,
            "local": 0.0,
            "scattered": 0.0,
        }


def summoned() -> list[Any]:
    torch.manual_seed(dist.get_rank())  # different on each rank: the first one's count
    model = wrapped(Net())
    told: list[Any] = []
    names = [name for name, _ in model.named_parameters()]
    told.append(names == [name for name, _ in Net().named_parameters()])
    told.append(sum(param.numel() for param in model.parameters()) < sum(p.numel() for p in Net().parameters()))
    with FSDP.summon_full_params(model):
        told.append(list(model.inlet.weight.shape))
        with torch.no_grad():
            model.inlet.weight.fill_(0.25)
    told.append(float(model.state_dict()["inlet.weight"].mean()))
    with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        model.inlet.weight.fill_(0.5)
    told.append(float(model.state_dict()["inlet.weight"].mean()))
    told.append([param.ndim for param in model.parameters()] == [param.ndim for param in Net().parameters()])
    model.apply(lambda module: torch.nn.init.zeros_(module.bias) if hasattr(module, "bias") else None)
    told.append(float(model.state_dict()["outlet.bias"].abs().sum()))
    return told


def test_parameters_and_summoning(ranks: RankPool) -> None:
    assert ranks.run(summoned, ranks=2) == [[True, True, [12, 7], 0.25, 0.25, True, 0.0]] * 2


class Encoder(torch.nn.Module):
    """A method beside forward that uses parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(2))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.encode(x))


def second_interface() -> dict[str, Any]:
    torch.manual_seed(0)
    model = in_parts(Encoder())
    twin = Encoder()
    twin.load_state_dict(model.state_dict())
    register_fsdp_forward_method(model, "encode")
    x = batch(0, 0)
    found: dict[str, Any] = {"encode": largest_difference([model.encode(x)], [twin.encode(x)])}
    handle = model.blocks[0].unshard(async_op=True)
    assert handle is not None
    handle.wait()
    model.blocks[0].reshard()
    weight = model.blocks[0].weight
    found["whole"] = largest_difference([weight.full_tensor()], [twin.blocks[0].weight])
    found["local"] = weight.to_local().numel() < 49
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    found["not reduced"] = weight.grad is None
    model.set_requires_gradient_sync(True)
    model(x).sum().backward()
    found["reduced"] = weight.grad is not None
    refused = []
    for attempt in (
        lambda: model.set_gradient_divide_factor(1.0),
        lambda: model.set_all_reduce_hook(print),
        lambda: model.set_requires_all_reduce(False),
        lambda: fully_shard(model),
        lambda: fully_shard(torch.nn.Linear(2, 2), shard_placement_fn=print),
        lambda: fully_shard(torch.nn.ModuleList()),
    ):
        try:
            attempt()
            refused.append("done")
        except ShardrtError as error:
            refused.append(str(error))
    found["refused"] = [bool(text) and text != "done" for text in refused]
    return found


def test_fully_shard_has_its_methods(ranks: RankPool) -> None:
    for found in ranks.run(second_interface, ranks=2):
        assert found == {
            "encode": 0.0,
            "whole": 0.0,
            "local": True,
            "not reduced": True,
            "reduced": True,
            "refused": [True] * 6,
        }


def low_precision(interface: str) -> list[str]:
    if interface == "wrapper":
        mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model: Any = wrapped(Net(), mixed_precision=mixed)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = Net()
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    output = model(batch(0, dist.get_rank()))
    output.float().pow(2).mean().backward()
    opt.step()
    first = next(iter(model.parameters()))
    return [str(output.dtype), str(first.dtype), str(first.grad.dtype), str(model.state_dict()["inlet.weight"].dtype)]


@pytest.mark.parametrize("interface", ["wrapper", "fully_shard"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_mixed_precision(ranks: RankPool, interface: str, world_size: int) -> None:
    for told in ranks.run(low_precision, ranks=world_size, interface=interface):
        assert told == ["torch.bfloat16", "torch.float32", "torch.float32", "torch.float32"]


def refusals() -> list[str]:
    told = []

    def early() -> None:
        model = Net()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        sharded = FSDP(model)
        sharded(batch(0, 0)).sum().backward()
        opt.step()

    def whole_matrices() -> None:
        model = wrapped(torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False)))
        opt = torch.optim.Muon(model.parameters(), lr=0.1)
        model(torch.ones(1, 8)).sum().backward()
        opt.step()

    def inner_used() -> None:
        model = Net()
        model.inlet = FSDP(model.inlet)  # type: ignore[assignment]
        list(model.inlet.parameters())
        FSDP(model)

    for attempt in (
        early,
        whole_matrices,
        inner_used,
        lambda: FSDP(torch.nn.ModuleList()),
        lambda: FSDP(Net(), sharding_strategy="FULL_SHARD"),  # type: ignore[arg-type]
        lambda: FSDP(Net(), ignored_modules=[], ignored_states=[]),
        lambda: FSDP(Net()).register_comm_hook(None, print),
        lambda: FSDP.state_dict_type(Net(), StateDictType.FULL_STATE_DICT).__enter__(),
        lambda: FSDP.set_state_dict_type(FSDP(Net()), StateDictType.FULL_STATE_DICT, ShardedStateDictConfig()),
    ):
        try:
            attempt()
            told.append("done")
        except ShardrtError as error:
            told.append(str(error))
    return told


def test_what_cannot_be_is_refused_with_what_can(ranks: RankPool) -> None:
    words = (
        "made before its module was sharded",
        "rt.shard",
        "wrap everything first",
        "has a forward",
        "member of ShardingStrategy",
        "not both",
        "backend plugin",
        "no FullyShardedDataParallel",
        "goes with FullStateDictConfig",
    )
    for told in ranks.run(refusals, ranks=2):
        for text, wanted in zip(told, words, strict=True):
            assert wanted in text, told


def trained_and_saved(path: str) -> float:
    script = Script(lambda model: wrapped(model, "SHARD_GRAD_OP"))
    plain_loop(script)
    state, optimizer = script.model.state_dict(), FSDP.optim_state_dict(script.model, script.opt)
    if dist.get_rank() == 0:
        torch.save({"model": state, "optim": optimizer}, path)
    dist.barrier()
    return script.difference()


def resumed(path: str) -> float:
    script = Script(lambda model: wrapped(model))
    saved = torch.load(path, weights_only=True)
    script.model.load_state_dict(saved["model"])
    script.opt.load_state_dict(FSDP.optim_state_dict_to_load(script.model, script.opt, saved["optim"]))
    script.twin.load_state_dict(saved["model"])
    numbered = FSDP.rekey_optim_state_dict(saved["optim"], _by_id(), script.twin)
    script.plain.load_state_dict(numbered)
    plain_loop(script)
    return script.difference()


def _by_id() -> Any:
    from torch.distributed.fsdp import OptimStateKeyType

    return OptimStateKeyType.PARAM_ID


def test_a_file_goes_on_with_another_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    assert max(ranks.run(trained_and_saved, ranks=2, path=path)) == 0.0
    assert max(ranks.run(resumed, ranks=3, path=path)) <= 1e-6


@pytest.mark.parametrize(
    "name", ["FullyShardedDataParallel", "FSDPModule", "fully_shard", "register_fsdp_forward_method"]
)
def test_arguments_are_called_as_torchs(name: str) -> None:
    ours, theirs = getattr(shardrt.compat, name), getattr(torch.distributed.fsdp, name)
    if not isinstance(theirs, type):
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
        return
    methods = [each for each, value in vars(theirs).items() if not each.startswith("_") and callable(value)]
    methods += ["__init__"] if name == "FullyShardedDataParallel" else []
    for method in methods:
        if isinstance(vars(theirs).get(method), (staticmethod,)) or inspect.isfunction(getattr(theirs, method)):
            wanted = list(inspect.signature(getattr(theirs, method)).parameters)
            got = list(inspect.signature(getattr(ours, method)).parameters)
            assert [each for each in wanted if each not in (*got, "args", "kwargs")] == [], method

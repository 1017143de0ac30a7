"""Every field of torch's FSDP classes has its effect, or is refused: one test for each, named in docs/fsdp-api.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shardrt.compat import FullyShardedDataParallel, fully_shard
from shardrt.errors import ShardrtError
from shardrt.optim.buffers import resting_memory
from shardrt.sharding.shard_tensors import ShardParameter
from shardrt.testing import RankPool
from tests.ranks.fsdp_scripts import wrapped
from tests.ranks.sharded_scenarios import Net
from tests.ranks.twins import batch

FSDP = FullyShardedDataParallel
LOW = torch.bfloat16


def runner_of(model: Any) -> Any:
    """What brings units, of either interface."""
    tree = model.sharded_tree if isinstance(model, FSDP) else model._sharded()
    return tree.runner


def asked(model: Any) -> list[bool]:
    """Of each block, whether its parameters are here or on their way."""
    return [params.is_here or params.is_coming for params in runner_of(model).params[1:]]


def strategies() -> list[list[Any]]:
    told = []
    total = sum(param.numel() for param in Net().parameters())
    for strategy in ShardingStrategy:
        mesh = init_device_mesh("cpu", (2, 2)) if "HYBRID" in strategy.name else None
        model = wrapped(Net(), strategy.name, device_mesh=mesh)
        share = sum(param.numel() for param in model.parameters()) / total
        loss = model(batch(0, dist.get_rank())).sum()
        told.append([strategy.name, share, all(one.is_here or not one.nbytes for one in runner_of(model).params)])
        loss.backward()
    return told


def test_strategies(ranks: RankPool) -> None:
    """What each rank keeps, and whether units stay between forward and backward."""
    for told in ranks.run(strategies, ranks=4):
        assert told == [
            ["FULL_SHARD", pytest.approx(0.25, abs=0.06), False],
            ["SHARD_GRAD_OP", pytest.approx(0.25, abs=0.06), True],
            ["NO_SHARD", 1.0, True],
            ["HYBRID_SHARD", pytest.approx(0.5, abs=0.06), False],
            ["_HYBRID_SHARD_ZERO2", pytest.approx(0.5, abs=0.06), True],
        ]


def watched(model: Any) -> dict[str, list[bool]]:
    """What is asked for ahead in the second step, seen from the middle of forward and of backward."""
    seen: dict[str, list[bool]] = {}

    def note(when: str) -> None:
        seen[when] = asked(model)

    def watch(number: int, when: str, *, first: bool) -> None:
        def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
            if first:
                note(f"forward of {number}")
            output.register_hook(lambda _: note(f"{when} backward of {number}"))

        # In the middle of a block's backward the gradient of what is inside it arrives.
        (model.blocks[number] if first else model.blocks[number][1]).register_forward_hook(hook, prepend=first)

    list(model.parameters())  # shards it: hooks come before those that bring and put away
    for number in range(len(model.blocks)):
        watch(number, "before", first=True)
        watch(number, "in", first=False)
    for step in range(2):
        model(batch(step, dist.get_rank())).sum().backward()
    return seen


def ahead_in_backward() -> list[list[bool]]:
    told = []
    for backward in (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None):
        seen = watched(wrapped(Net(), backward_prefetch=backward))
        told.append([seen["in backward of 2"][1], seen["before backward of 1"][1]])
    return told


def test_backward_prefetch(ranks: RankPool) -> None:
    """Whether block 1 is asked for while block 2 computes its gradients, and afterwards."""
    assert ranks.run(ahead_in_backward, ranks=2) == [[[True, True], [False, True], [False, False]]] * 2


def ahead_in_forward() -> list[list[list[bool]]]:
    told = []
    for forward, limited in ((False, True), (True, True), (True, False)):
        seen = watched(wrapped(Net(), forward_prefetch=forward, limit_all_gathers=limited))
        told.append([seen["forward of 0"], seen["in backward of 2"]])
    return told


def test_forward_prefetch_and_limit(ranks: RankPool) -> None:
    """Which blocks are asked for while block 0 computes, and while block 2 computes its gradients."""
    for plain, one, many in ranks.run(ahead_in_forward, ranks=2):
        assert plain == [[True, False, False], [False, True, True]]
        assert one == [[True, True, False], [False, True, True]]
        assert many == [[True, True, True], [True, True, True]]


class Seeing(torch.nn.Module):
    """Notes the dtypes that it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.register_buffer("shift", torch.ones(4))
        self.seen: dict[str, str] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["input"] = _short(x)
        x = self.linear(x.to(self.linear.weight.dtype))
        self.seen |= {"weight": _short(self.linear.weight), "norm": _short(self.norm.weight)}
        self.seen["buffer"] = _short(self.shift)
        return self.norm(x) + self.shift.to(x.dtype)  # type: ignore[no-any-return, operator]


class Pair(torch.nn.Module):
    """What goes from one part to the other is in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList([Seeing(), Seeing()])
        self.seen: dict[str, str] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["root"] = _short(x)
        hidden = self.parts[0](x)
        self.seen["hidden"] = _short(hidden)
        return self.parts[1](hidden.float())  # type: ignore[no-any-return]


def _short(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def precision(interface: str, **options: Any) -> dict[str, str]:
    options = {key: getattr(torch, value) if key.endswith("dtype") else value for key, value in options.items()}
    model: Any = Pair()
    if interface == "wrapper":
        if options.pop("ignores_norms", False):
            options["_module_classes_to_ignore"] = (torch.nn.LayerNorm,)
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Seeing}), mixed_precision=MixedPrecision(**options))
    else:
        policy = MixedPrecisionPolicy(**options)
        fully_shard(list(model.parts), mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    first = next(iter(model.parameters()))
    holder = (model.sharded_tree if isinstance(model, FSDP) else model._sharded()).holder
    reduced: list[str] = []
    wire = holder.wires.shared
    reduce_scatter = wire.reduce_scatter_pieces
    wire.reduce_scatter_pieces = lambda pieces, *args, **kwargs: (
        reduced.append(_short(pieces[0])) or reduce_scatter(pieces, *args, **kwargs)
    )
    output = model(torch.ones(2, 4))
    output.float().sum().backward()
    last = model.parts[1]
    return {
        **last.seen,
        **model.seen,
        "output": _short(output),
        "reduced": reduced[0],
        "kept": sorted({_short(one.gradient) for one in holder._owned.values()})[0],
        "gradient": _short(first.grad),
        "parameter": _short(first),
        "saved": _short(model.state_dict()["parts.0.linear.weight"]),
        "saved buffer": _short(model.state_dict()["parts.0.shift"]),
    }


LOWER = {"param_dtype": "bfloat16"}
MIXED: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "param_dtype": (
        LOWER,
        {"weight": "bfloat16", "norm": "bfloat16", "parameter": "float32", "saved": "float32", "reduced": "bfloat16"},
    ),
    "reduce_dtype": ({**LOWER, "reduce_dtype": "float32"}, {"weight": "bfloat16", "reduced": "float32"}),
    "buffer_dtype": ({"buffer_dtype": "float64"}, {"buffer": "float64", "saved buffer": "float32"}),
    "keep_low_precision_grads": ({**LOWER, "keep_low_precision_grads": True}, {"kept": "bfloat16"}),
    "not keep_low_precision_grads": (LOWER, {"kept": "float32", "gradient": "float32"}),
    "cast_forward_inputs": ({**LOWER, "cast_forward_inputs": True}, {"input": "bfloat16", "root": "bfloat16"}),
    "not cast_forward_inputs": (LOWER, {"input": "float32", "root": "bfloat16"}),
    "cast_root_forward_inputs": ({**LOWER, "cast_root_forward_inputs": False}, {"root": "float32"}),
    "_module_classes_to_ignore": ({**LOWER, "ignores_norms": True}, {"weight": "bfloat16", "norm": "float32"}),
}
POLICIES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "param_dtype": (LOWER, {"weight": "bfloat16", "saved": "float32", "output": "bfloat16", "hidden": "bfloat16"}),
    "reduce_dtype": ({**LOWER, "reduce_dtype": "float32"}, {"reduced": "float32"}),
    "output_dtype": ({**LOWER, "output_dtype": "float32"}, {"output": "float32", "hidden": "float32"}),
    "cast_forward_inputs": (LOWER, {"input": "bfloat16", "root": "bfloat16"}),
    "not cast_forward_inputs": ({**LOWER, "cast_forward_inputs": False}, {"input": "float32", "root": "float32"}),
}


def all_of(interface: str) -> list[dict[str, str]]:
    cases = MIXED if interface == "wrapper" else POLICIES
    return [precision(interface, **options) for options, _ in cases.values()]


def test_mixed_precision(ranks: RankPool) -> None:
    """Each field of MixedPrecision, by the dtypes that are met."""
    for found in ranks.run(all_of, ranks=2, interface="wrapper"):
        for (name, (_, wanted)), told in zip(MIXED.items(), found, strict=True):
            assert {key: told[key] for key in wanted} == wanted, (name, told)


def test_mixed_precision_policy(ranks: RankPool) -> None:
    """Each field of MixedPrecisionPolicy, by the dtypes that are met."""
    for found in ranks.run(all_of, ranks=2, interface="fully_shard"):
        for (name, (_, wanted)), told in zip(POLICIES.items(), found, strict=True):
            assert {key: told[key] for key in wanted} == wanted, (name, told)


def resting() -> list[Any]:
    told = []
    gpu = torch.device("cuda")
    for offload in (None, CPUOffload(), CPUOffload(offload_params=True)):
        model = FSDP(Net(), sharding_strategy=ShardingStrategy.NO_SHARD, cpu_offload=offload)
        holder: Any = model.sharded_tree.holder
        apart = all(one.shard_is_apart for one in holder.engine.every_buffers())
        told.append([apart, str(resting_memory(gpu, holder.residence)["device"])])
    for policy in (None, OffloadPolicy(), CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False)):
        holder = fully_shard(Net(), offload_policy=policy)._sharded().holder
        memory = resting_memory(gpu, holder.residence)
        told.append([str(memory["device"]), memory.get("pin_memory", False)])
    return told


def test_offload(ranks: RankPool) -> None:
    """Shards are kept apart from the parameters that are computed with, and where a GPU's would be kept."""
    for told in ranks.run(resting, ranks=2):
        assert told[:3] == [[False, "cuda"], [False, "cuda"], [True, "cpu"]]
        assert told[3:] == [["cuda", False], ["cuda", False], ["cpu", True], ["cpu", False]]


def arguments() -> dict[str, Any]:
    found: dict[str, Any] = {}
    rank = dist.get_rank()
    total = sum(param.numel() for param in Net().parameters())

    def share(model: Any) -> float:
        return round(sum(param.numel() for param in model.parameters()) / total, 1)

    pair = dist.new_group([0, 1])
    if rank < 2:
        found["process_group"] = share(FSDP(Net(), process_group=pair))
    found["device_mesh"] = share(FSDP(Net(), device_mesh=init_device_mesh("cpu", (4,))))
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    both = (rows[rank // 2], columns[rank % 2])
    hybrid = FSDP(Net(), process_group=both, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    found["process_groups"] = share(hybrid)
    policy = ModuleWrapPolicy({torch.nn.Linear})
    found["auto_wrap_policy"] = len(runner_of(FSDP(Net(), auto_wrap_policy=policy)).params)
    for name in ("ignored_modules", "ignored_states"):
        net = Net()
        given: Any = [net.inlet] if name == "ignored_modules" else [net.inlet.weight]
        left = dict(FSDP(net, **{name: given}).named_parameters())
        found[name] = [one for one in ("inlet.weight", "inlet.bias") if not isinstance(left[one], ShardParameter)]
    with torch.device("meta"):
        empty = Net()
    model = FSDP(empty, param_init_fn=_fill)
    found["param_init_fn"] = sorted({float(value.unique()) for value in model.state_dict().values()})
    found["device_id"] = str(FSDP(Net(), device_id=torch.device("meta")).module.inlet.weight.device)
    values = []
    for synced in (False, True):
        torch.manual_seed(rank)
        model = FSDP(Net(), sync_module_states=synced)
        torch.manual_seed(0)
        values.append(torch.equal(model.state_dict()["inlet.weight"], Net().inlet.weight))
    found["sync_module_states"] = values
    names = [[name for name, _ in FSDP(Net(), use_orig_params=use).named_parameters()] for use in (False, True)]
    found["use_orig_params"] = names[0] == names[1] == [name for name, _ in Net().named_parameters()]
    return found


@torch.no_grad()
def _fill(module: torch.nn.Module) -> None:
    for param in module.parameters(recurse=False):
        param.fill_(0.25)


def test_constructor(ranks: RankPool) -> None:
    """Arguments of FullyShardedDataParallel that are no class of their own."""
    for rank, found in enumerate(ranks.run(arguments, ranks=4)):
        assert found.pop("process_group", 0.5) == pytest.approx(0.5, abs=0.1), rank
        assert found == {
            "device_mesh": pytest.approx(0.25, abs=0.1),
            "process_groups": pytest.approx(0.5, abs=0.1),
            "auto_wrap_policy": 9,
            "ignored_modules": ["inlet.weight", "inlet.bias"],
            "ignored_states": ["inlet.weight"],
            "param_init_fn": [0.25],
            "device_id": "meta",
            "sync_module_states": [True, True],
            "use_orig_params": True,
        }


def units_of_their_own() -> list[str]:
    """Inner wrappers with settings that the outer one does not have."""
    told = []
    for options in (
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"mixed_precision": MixedPrecision(param_dtype=LOW)},
        {"cpu_offload": CPUOffload(offload_params=True)},
        {"backward_prefetch": None},
        {"param_init_fn": _fill},
        {"auto_wrap_policy": ModuleWrapPolicy({torch.nn.Linear})},
    ):
        net = Net()
        net.blocks[0] = FSDP(net.blocks[0], **options)  # type: ignore[arg-type]
        try:
            list(FSDP(net).parameters())
            told.append("done")
        except ShardrtError as error:
            told.append(str(error))
    net = Net()
    net.blocks[0] = FSDP(net.blocks[0], ignored_modules=[net.blocks[0][2]])  # type: ignore[index]
    shape = dict(FSDP(net).named_parameters())["blocks.0.2.weight"].shape
    return [*told, str(list(shape))]


def test_inner_wrappers_with_other_settings(ranks: RankPool) -> None:
    """They are refused, never passed over; what they ignore is ignored."""
    for told in ranks.run(units_of_their_own, ranks=2):
        assert all("inner FullyShardedDataParallel" in text for text in told[:-1]), told
        assert told[-1] == "[12, 23]"


def placed() -> dict[str, Any]:
    found: dict[str, Any] = {}
    model: Any = Net()
    free = model.inlet.weight
    for block in model.blocks:
        fully_shard(block, ignored_params={free})
    fully_shard(model, ignored_params={free}, mesh=init_device_mesh("cpu", (2, 2)))
    try:
        list(model.parameters())
    except ShardrtError as error:
        found["mesh of some"] = "pass the same to all" in str(error)
    mesh = init_device_mesh("cpu", (2, 2))
    model = Net()
    free = model.inlet.weight
    fully_shard(model, ignored_params={free}, mesh=mesh)
    found["mesh"] = sum(param.numel() for param in model.parameters()) / sum(p.numel() for p in Net().parameters())
    found["ignored_params"] = dict(model.named_parameters())["inlet.weight"] is free
    stays = []
    for kept, root in ((None, None), (True, True), (False, None), (2, None), (2, 2)):
        model = Net()
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=kept)
        fully_shard(model, reshard_after_forward=root)
        loss = model(batch(0, dist.get_rank())).sum()
        runner = runner_of(model)
        stays.append([runner.params[0].is_here, all(asked(model)), runner.params[1]._near is not None])
        loss.backward()
    found["reshard_after_forward"] = stays
    several = fully_shard([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])
    found["module"] = [isinstance(next(iter(one.parameters())), ShardParameter) for one in several]
    return found


def test_fully_shard_arguments(ranks: RankPool) -> None:
    """What is kept, and for how long, says every argument of fully_shard."""
    for found in ranks.run(placed, ranks=4):
        assert found == {
            "mesh of some": True,
            "mesh": pytest.approx(0.5, abs=0.06),
            "ignored_params": True,
            "reshard_after_forward": [
                [True, False, False],
                [False, False, False],
                [True, True, False],
                [True, False, True],
                [False, False, True],
            ],
            "module": [True, True],
        }

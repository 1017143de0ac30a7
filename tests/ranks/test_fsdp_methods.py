"""Every method of torch's FSDP classes, and every form of state: what each does, named in docs/fsdp-api.md."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    DataParallelMeshDims,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

import shardrt
from shardrt.compat import FullyShardedDataParallel, fully_shard, share_comm_ctx
from shardrt.errors import ShardrtError
from shardrt.state.kinds import StateKind
from shardrt.state.models import ModelState, copies
from shardrt.testing import RankPool
from tests.ranks.fsdp_scripts import Script, plain_loop, wrapped
from tests.ranks.sharded_scenarios import Net
from tests.ranks.test_fsdp_fields import asked, runner_of, watched
from tests.ranks.twins import average_backward, batch, largest_difference

FSDP = FullyShardedDataParallel
FORMS: dict[str, tuple[StateDictType, Any, Any]] = {
    "full": (StateDictType.FULL_STATE_DICT, FullStateDictConfig, FullOptimStateDictConfig),
    "sharded": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig, ShardedOptimStateDictConfig),
    "local": (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig, LocalOptimStateDictConfig),
}


def answers(attempts: list[Any]) -> list[str]:
    """What each is told; "done" where nothing is refused."""
    told = []
    for attempt in attempts:
        try:
            attempt()
            told.append("done")
        except ShardrtError as error:
            told.append(str(error))
    return told


def forms() -> dict[str, Any]:
    script = Script(lambda model: wrapped(model))
    script.backward(0)
    script.step()
    model: Any = script.model
    found: dict[str, Any] = {}
    asked_for: list[StateKind] = []
    runtime = model.sharded_tree.runtime
    make = runtime._made
    runtime._made = lambda target, kind: asked_for.append(kind) or make(target, kind)
    for name, (kind, config, for_optimizers) in FORMS.items():
        for offload in (False, True):
            with FSDP.state_dict_type(
                model, kind, config(offload_to_cpu=offload), for_optimizers(offload_to_cpu=not offload)
            ):
                state, optimizer = model.state_dict(), FSDP.optim_state_dict(model, script.opt)
                settings = FSDP.get_state_dict_type(model)
            flags = [asked_for[-2].offload_to_cpu, asked_for[-1].offload_to_cpu]
            assert flags == [offload, not offload] and [kind.kind for kind in asked_for[-2:]] == [name, name]
        found[name] = [sorted(state)[:2], optimizer.get("shardrt", {}).get("kind")]
        assert settings == StateDictSettings(kind, config(offload_to_cpu=True), for_optimizers(offload_to_cpu=False))
    only_first = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    before = FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, *only_first)
    found["rank0_only"] = [len(model.state_dict()), len(FSDP.optim_state_dict(model, script.opt))]
    found["before"] = before == StateDictSettings(
        StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
    )
    with shardrt.Runtime() as rt:
        net = torch.nn.Linear(2, 2)
        found["refused"] = answers(
            [
                lambda: FSDP.set_state_dict_type(model, FORMS["sharded"][0], ShardedStateDictConfig(_use_dtensor=True)),
                lambda: FSDP.set_state_dict_type(
                    model, FORMS["sharded"][0], None, ShardedOptimStateDictConfig(_use_dtensor=True)
                ),
                lambda: FSDP.set_state_dict_type(model, FORMS["full"][0], LocalStateDictConfig()),
                lambda: rt.set_state_dict_type(net, "sharded", ShardedStateDictConfig(_use_dtensor=True)),
                lambda: rt.set_state_dict_type(net, "full", LocalOptimStateDictConfig()),
            ]
        )
        for config, offload in ((StateDictConfig(), False), (OptimStateDictConfig(), True)):
            rt.set_state_dict_type(net, "full", config)
            assert rt.set_state_dict_type(net, "full").offload_to_cpu is offload
    return found


def test_forms_of_state(ranks: RankPool) -> None:
    """StateDictType, its configs field by field, and the settings that hold them."""
    count = len(Net().state_dict())
    for rank, found in enumerate(ranks.run(forms, ranks=2)):
        assert found["full"] == [["blocks.0.0.bias", "blocks.0.0.weight"], None]
        assert found["sharded"] == [["aliases", "extra_state"], "sharded"]
        assert found["local"] == [["aliases", "extra_state"], "local"]
        assert found["rank0_only"] == ([count, 2] if rank == 0 else [0, 0])
        assert found["before"]
        for text, words in zip(
            found["refused"], ("_use_dtensor", "_use_dtensor", "goes with", "_use_dtensor", "for local"), strict=True
        ):
            assert words in text, found["refused"]


def rolled_back(form: str) -> list[bool]:
    """Whether model and optimizer are again what they were when their state was taken, two steps before."""
    script = Script(lambda model: wrapped(model))
    script.backward(0)
    script.step()
    model: Any = script.model
    whole, moments = model.state_dict(), copy.deepcopy(FSDP.optim_state_dict(model, script.opt))
    with FSDP.state_dict_type(model, FORMS[form][0]):
        kept, of_optimizer = model.state_dict(), FSDP.optim_state_dict(model, script.opt)
    for step in (1, 2):
        script.backward(step)
        script.step()
    changed = model.state_dict()
    with FSDP.state_dict_type(model, FORMS[form][0]):
        model.load_state_dict(kept)
        script.opt.load_state_dict(FSDP.optim_state_dict_to_load(model, script.opt, of_optimizer))
    again, moments_again = model.state_dict(), FSDP.optim_state_dict(model, script.opt)
    return [
        any(not torch.equal(changed[name], value) for name, value in whole.items()),
        all(torch.equal(again[name], value) for name, value in whole.items()),
        all(
            torch.equal(torch.as_tensor(moments_again["state"][name][key]), torch.as_tensor(value))
            for name, values in moments["state"].items()
            for key, value in values.items()
        ),
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_state_that_is_kept_stays_what_it_was(ranks: RankPool, form: str) -> None:
    assert ranks.run(rolled_back, ranks=2, form=form) == [[True, True, True]] * 2


def test_offload_to_cpu_moves() -> None:
    """A tensor on the meta device stands for one on a GPU: it cannot be brought, so that trying to is seen."""
    state = ModelState(
        tensors={"weight": torch.ones(2, device="meta")}, aliases={}, values={}, buffers=frozenset(), apart={}
    )
    assert copies(state, on_cpu=False)["weight"].device.type == "meta"
    with pytest.raises(NotImplementedError, match="meta"):
        copies(state, on_cpu=True)


def optimizer_states() -> dict[str, Any]:
    script = Script(lambda model: wrapped(model))
    plain_loop(script)
    model, opt = script.model, script.opt
    found: dict[str, Any] = {}
    part = FSDP.sharded_optim_state_dict(model, opt)
    full = FSDP.full_optim_state_dict(model, opt, rank0_only=False)
    found["full on rank 0"] = bool(FSDP.full_optim_state_dict(model, opt))
    other = Script(lambda fresh: wrapped(fresh))
    for how, state in (
        ("flatten_sharded", FSDP.flatten_sharded_optim_state_dict(part, other.model, other.opt)),
        ("shard_full", FSDP.shard_full_optim_state_dict(full, other.model, optim=other.opt)),
    ):
        other.opt.load_state_dict(state)
        found[how] = largest_difference(
            [other.opt.state[param]["exp_avg"] for param in other.model.parameters() if param.numel()],
            [opt.state[param]["exp_avg"] for param in model.parameters() if param.numel()],
        )
    fresh = Script(lambda one: wrapped(one))
    FSDP.optim_state_dict_to_load(fresh.model, fresh.opt, full, load_directly=True)
    found["load_directly"] = all(param in fresh.opt.state for param in fresh.model.parameters() if param.numel())
    numbered = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, model)
    named = FSDP.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, model)
    found["PARAM_ID"] = sorted(numbered["state"]) == list(range(len(full["state"])))
    found["PARAM_NAME"] = list(named["state"]) == list(full["state"])
    found["refused"] = answers(
        [
            lambda: FSDP.optim_state_dict(model, opt, group=dist.new_group([0, 1])),
            lambda: FSDP.optim_state_dict(model, opt, opt.state_dict()),
            lambda: FSDP.optim_state_dict_to_load(model, opt, full, is_named_optimizer=True),
            lambda: FSDP.shard_full_optim_state_dict(full, model),
            lambda: model.load_state_dict(model.state_dict(), assign=True),
        ]
    )
    return found


def test_optimizer_states(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks.run(optimizer_states, ranks=2)):
        refused = found.pop("refused")
        for text, words in zip(
            refused, ("group=", "pass the optimizer", "is_named_optimizer", "pass optim=", "assign"), strict=True
        ):
            assert words in text, refused
        assert found.pop("full on rank 0") == (rank == 0)
        assert found == {
            "flatten_sharded": 0.0,
            "shard_full": 0.0,
            "load_directly": True,
            "PARAM_ID": True,
            "PARAM_NAME": True,
        }


def wrapper_methods() -> dict[str, Any]:
    found: dict[str, Any] = {}
    net: Any = torch.nn.Sequential(torch.nn.Linear(7, 7), torch.nn.BatchNorm1d(7))
    inner = net[1] = FSDP(net[1])
    model = FSDP(net)
    found["check_is_root"] = [model.check_is_root(), inner.check_is_root()]
    found["fsdp_modules"] = [len(FSDP.fsdp_modules(model)), len(FSDP.fsdp_modules(model, root_only=True))]
    found["module"] = model.module is net and inner.module is not inner
    found["named_buffers"] = [name for name, _ in model.named_buffers()]
    script = Script(lambda one: wrapped(one))
    script.backward(0)
    sharded: Any = script.model
    theirs = {name: param.grad for name, param in script.twin.named_parameters()}
    with FSDP.summon_full_params(sharded, with_grads=True):
        ours = {name: param.grad for name, param in sharded.module.named_parameters()}
        found["with_grads"] = max(largest_difference([ours[name]], [theirs[name]]) for name in theirs)
        sharded.inlet.weight.grad.fill_(0.5)
    gradient = dict(sharded.named_parameters())["inlet.weight"].grad
    found["written back"] = gradient is None or bool((gradient == 0.5).all())
    with FSDP.summon_full_params(sharded, rank0_only=True, writeback=False):
        try:
            found["rank0_only"] = sharded.inlet.weight.sum().ndim == 0
        except shardrt.errors.StateError:
            found["rank0_only"] = False
    with FSDP.summon_full_params(sharded, recurse=False):
        found["recurse"] = [bool(sharded.outlet.weight.any()), *answers([sharded.blocks[0][0].weight.sum])]
    found["refused"] = answers(
        [lambda: FSDP.summon_full_params(sharded, with_grads=True, offload_to_cpu=True).__enter__()]
    )
    return found


def test_wrapper_methods(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks.run(wrapper_methods, ranks=2)):
        whole, inside = found.pop("recurse")
        assert whole and "are sharded" in inside
        assert "leave these out" in found.pop("refused")[0]
        assert found.pop("rank0_only") == (rank == 0)
        assert found == {
            "check_is_root": [True, False],
            "fsdp_modules": [2, 1],
            "module": True,
            "named_buffers": ["1.running_mean", "1.running_var", "1.num_batches_tracked"],
            "with_grads": 0.0,
            "written back": True,
        }


def in_blocks() -> Any:
    model: Any = Net()
    fully_shard(list(model.blocks))
    return fully_shard(model)


def followed() -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = in_blocks()
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    model.blocks[2].set_modules_to_backward_prefetch([])
    seen = watched(model)
    found["prefetch"] = [seen["forward of 0"], seen["in backward of 2"]]
    model = in_blocks()
    runner = runner_of(model)

    def between() -> list[bool]:
        loss = model(batch(0, dist.get_rank())).sum()
        here = [runner.params[0].is_here, all(asked(model))]
        loss.backward()
        return [*here, all(asked(model))]

    found["at first"] = between()
    model.set_reshard_after_forward(False)
    found["kept after forward"] = between()
    model.set_reshard_after_forward(True)
    found["root goes too"] = between()
    model.set_reshard_after_backward(False)
    found["kept after backward"] = between()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = Net()
    twin.load_state_dict(model.state_dict())
    model.zero_grad()
    for step in range(2):
        average_backward(twin, lambda rank: twin(batch(step, rank)).sum(), 2)  # noqa: B023
        model(batch(step, dist.get_rank())).sum().backward()
    opt.step()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    found["not stale"] = largest_difference([model(batch(9, 0))], [twin(batch(9, 0))]) < 1e-5
    for block in model.blocks:
        block.set_requires_gradient_sync(False)
    found["some"] = answers([lambda: model(batch(0, 0))])[0]
    model.set_requires_gradient_sync(False, recurse=False)
    model.zero_grad()
    model(batch(0, 0)).sum().backward()
    found["all"] = all(param.grad is None for param in model.parameters())
    return found


def test_module_settings_are_followed(ranks: RankPool) -> None:
    for found in ranks.run(followed, ranks=2):
        assert "alike" in found.pop("some")
        assert found == {
            "prefetch": [[True, True, True], [False, False, True]],
            "at first": [True, False, False],
            "kept after forward": [True, True, False],
            "root goes too": [False, False, False],
            "kept after backward": [False, False, True],
            "not stale": True,
            "all": True,
        }


class Failing(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ValueError("as if out of memory")


def goes_on(where: str) -> float:
    script = Script(lambda _: in_blocks())
    script.twin.load_state_dict(script.model.state_dict())
    model: Any = script.model
    script.backward(0)
    script.step()
    kind = "register_forward_hook"
    breaking = {
        "backward": lambda module, args, output: Failing.apply(output),
        "forward": lambda module, args, output: 1 / 0,
    }
    handle = getattr(model.blocks[1], kind)(breaking[where])
    try:
        model(batch(1, dist.get_rank())).sum().backward()
    except (ValueError, ZeroDivisionError):
        handle.remove()
        model.reset_iter_state()
    assert all(param.grad is None for param in model.parameters())
    plain_loop(script)
    return script.difference()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_reset_iter_state(ranks: RankPool, where: str) -> None:
    """After an exception on all ranks training goes on as if that step had not been tried."""
    assert max(ranks.run(goes_on, ranks=2, where=where)) == 0.0


class Choosing(torch.nn.Module):
    """Uses one half or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = torch.nn.ModuleList([torch.nn.Linear(7, 3), torch.nn.Linear(7, 3)])

    def forward(self, x: torch.Tensor, half: int) -> torch.Tensor:
        return self.halves[half](x)  # type: ignore[no-any-return]


def hints() -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = Choosing()
    twin = copy.deepcopy(model)
    fully_shard(model)
    blocks = in_blocks()
    for call in (
        lambda: model.set_reduce_scatter_unused_params(True),
        lambda: model.set_reduce_scatter_max_input_buffers(2),
        lambda: model.set_separate_reduce_scatter_group(),
        lambda: model.set_force_sum_reduction_for_comms(True),
        lambda: model.set_is_last_backward(True),
        lambda: model.set_unshard_in_backward(False),
        lambda: model.set_post_optim_event(None),
        lambda: model.set_allocate_memory_from_process_group_for_comm(False),
        lambda: model.set_gradient_divide_factor(2),
        lambda: model.set_reduce_scatter_divide_factor(2),
        lambda: model.set_requires_all_reduce(True),
        lambda: share_comm_ctx([model, blocks]),
    ):
        call()
    rank = dist.get_rank()
    model(batch(0, rank), rank).sum().backward()
    average_backward(twin, lambda rank: twin(batch(0, rank), rank).sum(), 2)
    with torch.no_grad():
        worst = max(
            largest_difference([param.full_tensor()], [twin.get_parameter(name)])
            for name, param in model.named_parameters()
        )
    opt, plain = (torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, twin))
    opt.step()
    plain.step()
    state = model.state_dict()
    worst = max(worst, *(largest_difference([state[name]], [value]) for name, value in twin.state_dict().items()))
    refused = answers(
        [
            lambda: model.set_symm_mem_for_comm(),
            lambda: model.set_allocate_memory_from_process_group_for_comm(True),
            lambda: model.set_custom_all_gather(None),
            lambda: model.set_custom_reduce_scatter(None),
            lambda: model.set_all_reduce_hook(print),
            lambda: model.set_reduce_scatter_divide_factor(1.0),
            lambda: model.set_requires_all_reduce(False),
            lambda: model.set_reduce_scatter_max_input_buffers(0),
            lambda: blocks.blocks[0].reset_iter_state(),
            lambda: model.set_modules_to_forward_prefetch([torch.nn.Linear(1, 1)]),
            lambda: share_comm_ctx([torch.nn.Linear(1, 1)]),  # type: ignore[list-item]
            lambda: model.load_state_dict(state, assign=True),
            lambda: fully_shard(torch.nn.Linear(2, 2), shard_placement_fn=print),
            lambda: fully_shard([torch.nn.Linear(2, 2)], dp_mesh_dims=DataParallelMeshDims(shard="fsdp")),
            lambda: fully_shard([torch.nn.Linear(2, 2)], dp_mesh_dims=DataParallelMeshDims(replicate="dp")),
        ]
    )
    return {"difference": worst, "refused": refused}


def test_module_hints_and_refusals(ranks: RankPool) -> None:
    """Hints leave the result alone, a parameter that one rank did not use included; the rest says what to do."""
    words = (
        *["backend plugin"] * 5,
        "scale the loss",
        "set_requires_gradient_sync",
        "from 1 up",
        "outermost module",
        "passed to fully_shard",
        "passed to fully_shard",
        "leave assign out",
        *["leave them out"] * 3,
    )
    for found in ranks.run(hints, ranks=2):
        assert found["difference"] <= 1e-6
        for text, wanted in zip(found["refused"], words, strict=True):
            assert wanted in text, found["refused"]

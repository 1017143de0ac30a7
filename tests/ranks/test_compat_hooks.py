"""The step inside DDP's backward through torch's two hooks: what they promise, without what limits them in torch."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from shardrt import compat
from shardrt.compat import ZeroRedundancyOptimizer
from shardrt.errors import ShardrtError
from shardrt.testing import RankPool
from tests.ranks.test_compat import groups_of, run_script
from tests.ranks.test_overlap import Deep
from tests.ranks.twins import batch, largest_difference, twins

HOOKS = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
}


def halved(state, bucket):  # type: ignore[no-untyped-def]  # DDP takes annotations as objects only, or none
    """A hook of a user's own: half of the sum, and the buckets it saw in the state that it is registered with."""
    state.append(bucket.index())
    buffer = bucket.buffer().mul_(0.5)
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


WRAPPED: dict[str, Callable[..., Any]] = {"allreduce": allreduce_hook, "fp16": fp16_compress_hook, "own": halved}


def overlapped(
    hook: str,
    split: bool = False,
    wrapped: str = "allreduce",
    optimizer: str = "adamw",
    unused: bool = False,
    scheduler_first: bool = True,
    steps: int = 8,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Both twins for a while: the largest difference after each step, and how much of the state is here."""
    ours, theirs = twins(lambda: Deep(sometimes=unused))
    options = {"bucket_cap_mb": 0.003, "find_unused_parameters": unused, **(options or {})}
    ddp, twin = DistributedDataParallel(ours, **options), DistributedDataParallel(theirs, **options)
    states: list[Any] = [None, None] if wrapped != "own" else [[], []]
    if wrapped != "allreduce":
        twin.register_comm_hook(states[1], WRAPPED[wrapped])
    kind, defaults = OPTIMIZERS[optimizer]
    zero = ZeroRedundancyOptimizer(groups_of(ddp), kind, overlap_with_ddp=True, **defaults)
    plain = kind(groups_of(twin), **defaults)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(plain, steps)]
    handed_out = zero.param_groups[1]
    if scheduler_first:
        schedulers.append(torch.optim.lr_scheduler.CosineAnnealingLR(zero, steps))
    ddp.register_comm_hook(states[0], getattr(compat, hook)(WRAPPED[wrapped], ddp, zero, shard_buckets=split))
    if not scheduler_first:
        schedulers.append(torch.optim.lr_scheduler.CosineAnnealingLR(zero, steps))
    seen: list[bool] = []
    zero.register_step_post_hook(lambda stepped, *_: seen.append(stepped is zero))
    differences = []
    for step in range(steps):
        ddp(batch(step, dist.get_rank())).pow(2).mean().backward()
        zero.zero_grad()
        twin(batch(step, dist.get_rank())).pow(2).mean().backward()
        plain.step()
        plain.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        differences.append(largest_difference(ours.parameters(), theirs.parameters()))
    assert seen == [True] * steps
    assert handed_out is zero.param_groups[1] and handed_out["lr"] == plain.param_groups[1]["lr"]
    assert states[0] == states[1] and states[0] != []
    owned = sum(param.numel() for group in zero.optim.param_groups for param in group["params"])
    whole = sum(param.numel() for param in ours.parameters())
    partition = zero.sharded.plan.partition
    ranks_of_a_parameter = max(len({shard.rank for shard in shards}) for shards in partition.by_param.values())
    return {"differences": differences, "share": owned / whole, "cut": ranks_of_a_parameter > 1}


def check(found: list[dict[str, Any]], *, cut: bool = False) -> None:
    for each in found:
        assert each["differences"] == [0.0] * len(each["differences"])
        assert 0.2 < each["share"] < 0.8
        assert each["cut"] is cut
    assert abs(sum(each["share"] for each in found) - 1.0) < 1e-9


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_equals_ddp_from_the_first_update(ranks: RankPool, hook: str, split: bool) -> None:
    check(ranks.run(overlapped, ranks=2, hook=hook, split=split, scheduler_first=split), cut=split)


@pytest.mark.parametrize("wrapped", ["fp16", "own"])
@pytest.mark.parametrize("hook", HOOKS)
def test_the_wrapped_hook_reduces(ranks: RankPool, hook: str, wrapped: str) -> None:
    check(ranks.run(overlapped, ranks=2, hook=hook, wrapped=wrapped))


@pytest.mark.parametrize("wrapped", ["allreduce", "fp16"])
@pytest.mark.parametrize("hook", HOOKS)
def test_parameters_that_get_no_gradient(ranks: RankPool, hook: str, wrapped: str) -> None:
    check(ranks.run(overlapped, ranks=2, hook=hook, wrapped=wrapped, unused=True))


@pytest.mark.parametrize(
    "options", [{"static_graph": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0, "static_graph": True}]
)
@pytest.mark.parametrize("hook", HOOKS)
def test_ddp_options(ranks: RankPool, hook: str, options: dict[str, Any]) -> None:
    check(ranks.run(overlapped, ranks=2, hook=hook, options=options))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_an_optimizer_that_needs_whole_parameters(ranks: RankPool, hook: str, split: bool) -> None:
    check(ranks.run(overlapped, ranks=2, hook=hook, optimizer="adafactor", split=split))


def in_a_larger_ddp(hook: str) -> float:
    """DDP over all ranks, its optimizer sharded over pairs of them only."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ours, theirs = twins(Deep)
    ddp, twin = DistributedDataParallel(ours), DistributedDataParallel(theirs)
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, process_group=pairs[dist.get_rank() // 2], overlap_with_ddp=True
    )
    ddp.register_comm_hook(None, getattr(compat, hook)(allreduce_hook, ddp, zero, shard_buckets=True))
    plain = torch.optim.AdamW(twin.parameters())
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(step, dist.get_rank())).sum().backward()
        plain.zero_grad()
        twin(batch(step, dist.get_rank())).sum().backward()
        plain.step()
    return largest_difference(ours.parameters(), theirs.parameters())


@pytest.mark.parametrize("hook", HOOKS)
def test_the_optimizer_may_have_a_smaller_group_than_ddp(ranks: RankPool, hook: str) -> None:
    assert ranks.run(in_a_larger_ddp, ranks=4, hook=hook) == [0.0] * 4


def accumulated(hook: str) -> float:
    """Three backwards of which DDP synchronises the last."""
    ours, theirs = twins(Deep)
    ddp, twin = DistributedDataParallel(ours), DistributedDataParallel(theirs)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True)
    ddp.register_comm_hook(None, getattr(compat, hook)(allreduce_hook, ddp, zero))
    plain = torch.optim.AdamW(twin.parameters())
    for step in range(0, 9, 3):
        for model in (ddp, twin):
            model.zero_grad()
            with model.no_sync():
                for part in range(2):
                    model(batch(step + part, dist.get_rank())).sum().backward()
            model(batch(step + 2, dist.get_rank())).sum().backward()
        plain.step()
    return largest_difference(ours.parameters(), theirs.parameters())


@pytest.mark.parametrize("hook", HOOKS)
def test_accumulation_under_no_sync(ranks: RankPool, hook: str) -> None:
    for difference in ranks.run(accumulated, ranks=2, hook=hook):
        assert difference <= 5e-6


def test_torchs_loop_runs_under_torchrun(ranks: RankPool) -> None:
    """Both hooks, whole and split buckets; the group is destroyed before the optimizers, and the interpreter ends."""
    del ranks
    options = ("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    module = ("--local-addr", "127.0.0.1", "tests/ranks/zero_hooks_loop.py")
    printed = run_script("-m", "torch.distributed.run", *options, *module)
    found = re.findall(r"(hook_\w+) shard_buckets=(\w+) rank (\d): (\[[^]]*\])", printed)
    assert len({each[:3] for each in found}) == 8
    assert {each[3] for each in found} == {"[0.0, 0.0, 0.0, 0.0]"}
    assert printed.count("left the group") == 2


def misused() -> dict[str, list[str]]:
    """What each misuse raises: the names of the error's classes, and its text."""
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    late = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    plain = torch.optim.SGD(ddp.parameters(), lr=0.1)
    calls: dict[str, Callable[[], Any]] = {
        "no overlap": lambda: compat.hook_with_zero_step(allreduce_hook, ddp, late),
        "other optimizer": lambda: compat.hook_with_zero_step(allreduce_hook, ddp, plain),  # type: ignore[arg-type]
        "no ddp": lambda: compat.hook_with_zero_step(allreduce_hook, ddp.module, zero),  # type: ignore[arg-type]
        "too early": zero.state_dict,
        "hooked": lambda: ddp.register_comm_hook(None, compat.hook_with_zero_step(allreduce_hook, ddp, zero)),
        "hooked again": lambda: compat.hook_with_zero_step(allreduce_hook, ddp, zero),
        "group added": lambda: zero.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]}),
    }
    said = {name: raised_by(call) for name, call in calls.items()}
    before = [param.clone() for param in ddp.parameters()]
    assert zero.step() is None
    assert largest_difference(ddp.parameters(), before) == 0.0
    return {**said, "scaler": raised_by(lambda: scaled(ddp, zero))}


def raised_by(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except ShardrtError as error:
        return [*(base.__name__ for base in type(error).__mro__), str(error)]
    return []


def scaled(ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(ddp(torch.ones(1, 4)).sum()).backward()
    scaler.step(zero)


def test_misuse_raises_what_torch_raises(ranks: RankPool) -> None:
    for said in ranks.run(misused, ranks=2):
        assert said.pop("hooked") == []
        expected = {
            "no overlap": ("ValueError", "overlap_with_ddp=True"),
            "other optimizer": ("ValueError", "change its import too"),
            "no ddp": ("ValueError", "DistributedDataParallel"),
            "too early": ("RuntimeError", "only once hook_with_zero_step"),
            "hooked again": ("RuntimeError", "build another one"),
            "group added": ("RuntimeError", "wrap the module again"),
            "scaler": ("UnsupportedError", "use overlap_with_ddp=False"),
        }
        assert set(said) == set(expected)
        for name, (kind, text) in expected.items():
            assert kind in said[name] and text in said[name][-1], name


def comes_and_goes(hook: str, wrapped: str) -> list[list[str]]:
    """The threads that came with an optimizer which DDP alone keeps, and those of them that are left without DDP."""
    before = set(threading.enumerate())
    ddp = DistributedDataParallel(Deep())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True)
    ddp.register_comm_hook(None, getattr(compat, hook)(WRAPPED[wrapped], ddp, zero))
    del zero
    gc.collect()
    started_from = [param.clone() for param in ddp.parameters()]
    for step in range(2):
        ddp(batch(step, dist.get_rank())).sum().backward()
    assert largest_difference(ddp.parameters(), started_from) > 0.0
    came = [each for each in threading.enumerate() if each not in before and each.name.startswith("shardrt")]
    dist.barrier()
    del ddp
    deadline = time.monotonic() + 10
    while any(each.is_alive() for each in came) and time.monotonic() < deadline:
        gc.collect()  # again: a thread that was at work may have held the last reference a moment ago
        time.sleep(0.1)  # some are only told to end
    return [[each.name for each in came], [each.name for each in came if each.is_alive()]]


@pytest.mark.parametrize("wrapped", ["allreduce", "fp16"])
@pytest.mark.parametrize("hook", HOOKS)
def test_ddp_keeps_the_optimizer_and_nothing_keeps_both(ranks: RankPool, hook: str, wrapped: str) -> None:
    for came, left in ranks.run(comes_and_goes, ranks=2, hook=hook, wrapped=wrapped):
        assert came != []
        assert left == []

"""What an ordinary loop does keeps its meaning under every schedule."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import shardrt
from shardrt.testing import RankPool
from tests.ranks.combinations import FEATURES, SCHEDULES, TOLERANCE, all_combinations, run_combination
from tests.ranks.test_overlap import Deep
from tests.ranks.twins import batch, largest_difference, twins

_SAMPLE = [
    *((feature,) for feature in FEATURES),
    *random.Random(3).sample([some for some in all_combinations() if len(some) > 1], 6),
    FEATURES,
]


def _check(found: list[dict[str, Any]], schedule: str) -> None:
    for one in found:
        if "refused" in one:
            assert schedule == "interleaved" and "use schedule='bucket' or 'priority'" in one["refused"]
        else:
            assert one["difference"] <= TOLERANCE


@pytest.mark.parametrize("features", _SAMPLE, ids="+".join)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_combinations(ranks: RankPool, schedule: str, features: tuple[str, ...]) -> None:
    _check(ranks.run(run_combination, ranks=2, schedule=schedule, features=list(features)), schedule)


@pytest.mark.long
@pytest.mark.parametrize("way", ["ddp", "plain"])
@pytest.mark.parametrize("features", all_combinations(), ids="+".join)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_combination(ranks: RankPool, schedule: str, features: tuple[str, ...], way: str) -> None:
    _check(ranks.run(run_combination, ranks=2, schedule=schedule, features=list(features), way=way), schedule)


def scaled_by_surprise(schedule: str) -> list[Any]:
    """A loop that uses a scaler or clips without having said so; whether any parameter has changed by then."""
    said = []
    for what in ("scaler", "norm", "value"):
        torch.manual_seed(0)
        model = Deep()
        before = [param.detach().clone() for param in model.parameters()]
        with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=20) as rt:
            opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-2)
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(model(batch(0, rt.rank)).pow(2).mean()).backward()
            with pytest.raises(shardrt.errors.UnsupportedError, match="use schedule='bucket' or 'priority'"):
                if what == "scaler":
                    scaler.step(opt)
                elif what == "norm":
                    rt.clip_grad_norm_(model, 1.0)
                else:
                    rt.clip_grad_value_(model, 1.0)
            said.append(largest_difference(model.parameters(), before))
    return said


def test_a_loop_that_cannot_be_served_is_refused_before_anything_has_changed(ranks: RankPool) -> None:
    assert ranks.run(scaled_by_surprise, ranks=2, schedule="interleaved") == [[0.0, 0.0, 0.0]] * 2


# DDP takes the annotations of a hook only as objects, and there are none in this file: hooks here have none.
def own_hook(state, bucket):  # type: ignore[no-untyped-def]
    """A user's hook: sums, and halves every gradient."""
    state["calls"] += 1
    work: Any = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / 2)


def _in_turn(hook: Any) -> Any:
    """For DDP's own use: one bucket after the other (see Note [Hooks take turns]), and under a name that it does not
    refuse on Gloo."""

    def waiting(state, bucket):  # type: ignore[no-untyped-def]
        done = hook(state, bucket)
        done.wait()
        return done

    return waiting


def _hook(name: str) -> tuple[Any, Any]:
    """With a new state."""
    if name == "powerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        return state, powerSGD_hook.powerSGD_hook
    if name == "own":
        return {"calls": 0}, own_hook
    return None, {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[name]


def train_with_hook(
    schedule: str, hook: str, partitioner: Any = "greedy", steps: int = 8, options: dict[str, Any] | None = None
) -> list[float]:
    ours, theirs = twins(lambda: Deep(sometimes=bool(options and options.get("find_unused_parameters"))))
    options = {"bucket_cap_mb": 0.002, **(options or {})}
    model, twin = (DistributedDataParallel(each, **options) for each in (ours, theirs))
    with shardrt.Runtime(schedule=schedule, partitioner=partitioner, bucket_mb=0.003, timeout=20) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-2)
        state, function = _hook(hook)
        rt.attach(model, opt, hook=function, state=state)
        twin.register_comm_hook(_hook(hook)[0], _in_turn(function))
        plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        first = None
        for step in range(steps):
            for each, optimizer in ((model, opt), (twin, plain)):
                each(batch(step, rt.rank)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if first is None:
                first = largest_difference(ours.parameters(), theirs.parameters())
        assert hook != "own" or state["calls"] > steps
    return [first or 0.0, largest_difference(ours.parameters(), theirs.parameters())]


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powerSGD", "own"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_communication_hook_is_honoured(ranks: RankPool, schedule: str, hook: str) -> None:
    for found in ranks.run(train_with_hook, ranks=2, schedule=schedule, hook=hook):
        assert found == [0.0, 0.0]


@pytest.mark.parametrize(
    "partitioner", ["flat", {"name": "bucket", "split": False}, {"name": "bucket", "split": True}], ids=str
)
def test_a_communication_hook_with_cut_and_whole_buckets(ranks: RankPool, partitioner: Any) -> None:
    for found in ranks.run(train_with_hook, ranks=3, schedule="interleaved", hook="fp16", partitioner=partitioner):
        assert max(found) <= 5e-6


@pytest.mark.parametrize(
    "options", [{"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str
)
def test_a_communication_hook_with_options_of_ddp(ranks: RankPool, options: dict[str, Any]) -> None:
    for found in ranks.run(train_with_hook, ranks=2, schedule="interleaved", hook="own", options=options):
        assert found == [0.0, 0.0]


def failing_hook(_, bucket):  # type: ignore[no-untyped-def]
    if torch.distributed.get_rank() == 1:
        raise ValueError("the hook of rank 1 is broken")
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def train_with_failing_hook(schedule: str) -> None:
    model = DistributedDataParallel(Deep())
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=15) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-2)
        rt.attach(model, opt, hook=failing_hook)
        model(batch(0, rt.rank)).pow(2).mean().backward()
        opt.step()
        opt.finish()  # as whoever reads a parameter does


@pytest.mark.parametrize("schedule", ["bucket", "interleaved"])
def test_a_hook_that_fails_ends_every_rank(ranks: RankPool, schedule: str) -> None:
    for outcome in ranks.outcomes(train_with_failing_hook, ranks=2, schedule=schedule):
        assert outcome.error_type is not None and "the hook of rank 1 is broken" in outcome.error_message


def thaw(schedule: str) -> list[float]:
    """Layers are frozen, and later thawed, in the middle of training."""
    ours, theirs = twins(Deep)
    differences = []
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=20) as rt:
        opt = rt.optimizer(ours.named_parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
        plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
        for step in range(8):
            for each in (ours, theirs):
                each.layers[1].requires_grad_(not 2 <= step < 5)
                each.outlet.requires_grad_(step != 6)
            for each, optimizer in ((ours, opt), (theirs, plain)):
                each(batch(step, rt.rank)).pow(2).mean().backward()
                if each is theirs:
                    for param in each.parameters():
                        if param.grad is not None:
                            torch.distributed.all_reduce(param.grad)
                            param.grad /= 2
                optimizer.step()
                optimizer.zero_grad()
            differences.append(largest_difference(ours.parameters(), theirs.parameters()))
    return differences


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_freezing_and_thawing(ranks: RankPool, schedule: str) -> None:
    assert ranks.run(thaw, ranks=2, schedule=schedule) == [[0.0] * 8] * 2


class Branches(torch.nn.Module):
    """One of two branches, by what the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = torch.nn.Linear(7, 19), torch.nn.Linear(19, 3), torch.nn.Linear(19, 3)

    def forward(self, x: torch.Tensor, right: bool) -> torch.Tensor:
        return (self.right if right else self.left)(torch.tanh(self.trunk(x)))


def branches(schedule: str) -> float:
    """A rank may have nothing at all for an optimizer in one backward, and something in the next."""
    ours, theirs = twins(Branches)
    model, twin = (DistributedDataParallel(each, find_unused_parameters=True) for each in (ours, theirs))
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.0001, timeout=15) as rt:
        mine = [
            rt.optimizer(list(each.named_parameters()), torch.optim.AdamW, lr=1e-2)
            for each in (ours.trunk, ours.left, ours.right)
        ]
        rt.attach(model, *mine)
        plain = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (theirs.trunk, theirs.left, theirs.right)]
        parts = 1 if schedule == "interleaved" else 2
        for step in range(6):
            for each, optimizers in ((model, mine), (twin, plain)):
                for part in range(parts):
                    right = (step + part * rt.rank) % 3 == 1
                    each(batch(step * parts + part, rt.rank), right).pow(2).mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    return largest_difference(ours.parameters(), theirs.parameters())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_that_has_nothing_for_an_optimizer(ranks: RankPool, schedule: str) -> None:
    assert all(difference <= TOLERANCE for difference in ranks.run(branches, ranks=2, schedule=schedule))


def closures(schedule: str) -> float:
    ours, theirs = twins(Deep)
    twin = DistributedDataParallel(theirs)
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=20) as rt:
        opt = rt.optimizer(ours.named_parameters(), torch.optim.AdamW, lr=1e-2)
        plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        for step in range(6):
            losses = []
            for each, optimizer in ((ours, opt), (twin, plain)):

                def closure(each: Any = each, optimizer: Any = optimizer, step: int = step) -> Any:
                    optimizer.zero_grad()
                    loss = each(batch(step, rt.rank)).pow(2).mean()
                    loss.backward()
                    return loss.detach()

                losses.append(float(optimizer.step(closure)))
            assert losses[0] == losses[1]
    return largest_difference(ours.parameters(), theirs.parameters())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_closures(ranks: RankPool, schedule: str) -> None:
    assert ranks.run(closures, ranks=2, schedule=schedule) == [0.0, 0.0]


def clip_by_value(schedule: str, way: str) -> float:
    ours, theirs = twins(Deep)
    twin = DistributedDataParallel(theirs)
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=20) as rt:
        model: Any = DistributedDataParallel(ours) if way == "ddp" else ours
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=1e-1, uses=["clipping"])
        if way == "ddp":
            rt.attach(model, opt)
        plain = torch.optim.SGD(twin.parameters(), lr=1e-1)
        for step in range(6):
            for each, optimizer in ((model, opt), (twin, plain)):
                each(batch(step, rt.rank)).pow(2).mean().backward()
                if each is twin:
                    torch.nn.utils.clip_grad_value_(each.parameters(), 1e-3)
                else:
                    rt.clip_grad_value_(each, 1e-3)
                optimizer.step()
                optimizer.zero_grad()
    return largest_difference(ours.parameters(), theirs.parameters())


@pytest.mark.parametrize("way", ["ddp", "plain"])
@pytest.mark.parametrize("schedule", ["sync", "bucket", "priority"])
def test_clipping_by_value(ranks: RankPool, schedule: str, way: str) -> None:
    assert ranks.run(clip_by_value, ranks=2, schedule=schedule, way=way) == [0.0, 0.0]


class MixedDtypes(torch.nn.Module):
    """Three kinds of numbers in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = torch.nn.Linear(7, 9), torch.nn.Linear(9, 9).double()
        self.short = torch.nn.Linear(9, 3).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.large(torch.tanh(self.small(x)).double()))
        return self.short(x.bfloat16()).float()


def subgroups_and_dtypes(schedule: str) -> list[float]:
    """Two pairs of ranks, each training a model of its own, with DDP on the pair's group."""
    import torch.distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    torch.manual_seed(mine)
    ours = MixedDtypes()
    theirs = copy.deepcopy(ours)
    model, twin = (DistributedDataParallel(each, process_group=pairs[mine]) for each in (ours, theirs))
    with shardrt.Runtime(schedule=schedule, process_group=pairs[mine], bucket_mb=0.0002, timeout=20) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-2)
        rt.attach(model, opt)
        plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        for step in range(6):
            for each, optimizer in ((model, opt), (twin, plain)):
                each(batch(10 * mine + step, rt.rank)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert len(opt.plan.buckets) > 3
    return [largest_difference(ours.parameters(), theirs.parameters()), float(ours.small.bias.detach().sum())]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_subgroups_and_several_dtypes(ranks: RankPool, schedule: str) -> None:
    found = ranks.run(subgroups_and_dtypes, ranks=4, schedule=schedule)
    # Halves are summed in float32 here and in their own precision by DDP: with two ranks that is the same.
    assert [difference for difference, _ in found] == [0.0] * 4
    assert found[0][1] == found[1][1] != found[2][1] == found[3][1]


def on_one_communicator(schedule: str) -> list[Any]:
    """The reference backend runs one communicator at a time."""
    ours, theirs = twins(Deep)
    twin = DistributedDataParallel(theirs)
    with shardrt.Runtime(schedule=schedule, backend="reference", bucket_mb=0.003, timeout=20) as rt:
        opt = rt.optimizer(ours.named_parameters(), torch.optim.AdamW, lr=1e-2)
        plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        for step in range(6):
            for each, optimizer in ((ours, opt), (twin, plain)):
                each(batch(step, rt.rank)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        other = torch.nn.Linear(2, 2)
        try:
            rt.optimizer(other.named_parameters(), torch.optim.SGD, lr=0.1)
            refused = ""
        except shardrt.errors.UnsupportedError as error:
            refused = str(error)
    return [largest_difference(ours.parameters(), theirs.parameters()), refused]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_backend_with_one_communicator(ranks: RankPool, schedule: str) -> None:
    for difference, refused in ranks.run(on_one_communicator, ranks=2, schedule=schedule):
        assert difference == 0.0
        assert (schedule == "sync") == (refused == "")
        assert schedule == "sync" or "use schedule='sync', or one optimizer with several" in refused


def changed_under_ddp(schedule: str) -> None:
    model = DistributedDataParallel(Deep())
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=20) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
        rt.attach(model, opt)
        model(batch(0, rt.rank)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        opt.step()


@pytest.mark.parametrize("schedule", ["bucket", "interleaved", "priority"])
def test_gradients_changed_under_ddp_are_noticed(ranks: RankPool, schedule: str) -> None:
    for outcome in ranks.outcomes(changed_under_ddp, ranks=2, schedule=schedule):
        assert outcome.error_type in ("OptimizerError", "PeerError")
        assert "gradients were changed after DDP's backward" in outcome.error_message

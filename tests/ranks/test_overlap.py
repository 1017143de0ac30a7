"""Steps inside backward: every schedule, plain and under DDP, equals DDP with the plain optimizer."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import shardrt
from shardrt.comm.thread import OperationThread
from shardrt.optim.engine import BucketEngine
from shardrt.testing import RankPool
from tests.ranks.twins import batch, largest_difference, twins

SCHEDULES = ["sync", "bucket", "interleaved", "priority"]
TOLERANCE = 5e-6


class Deep(torch.nn.Module):
    """Enough layers for several buckets, one of them used on odd steps only."""

    def __init__(self, *, sometimes: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(23, 23) for _ in range(5))
        self.inlet, self.outlet = torch.nn.Linear(7, 23), torch.nn.Linear(23, 3)
        self.extra = torch.nn.Linear(23, 23) if sometimes else None
        self.uses = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inlet(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.extra is not None:
            self.uses += 1
            x = self.extra(x) if self.uses % 2 else x
        return self.outlet(x)


def _groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    matrices = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    vectors = [(n, p) for n, p in model.named_parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 2e-2}]


def train(
    schedule: str,
    way: str,
    partitioner: str = "greedy",
    steps: int = 50,
    micro: int = 1,
    clip: float | None = None,
    unused: bool = False,
    options: dict[str, Any] | None = None,
) -> list[float]:
    """Both twins for a while; the largest difference after the first step and at the end."""
    ours, theirs = twins(lambda: Deep(sometimes=unused))
    options = {"find_unused_parameters": unused, **(options or {})}
    twin = DistributedDataParallel(theirs, **options)
    differences = []
    with shardrt.Runtime(schedule=schedule, partitioner=partitioner, bucket_mb=0.003, timeout=30) as rt:
        model = DistributedDataParallel(ours, **options) if way == "ddp" else ours
        opt = rt.optimizer(_groups(model), torch.optim.AdamW, lr=1e-2)
        if way == "ddp":
            rt.attach(model, opt)
        plain = torch.optim.AdamW(_groups(twin), lr=1e-2)
        schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, steps) for each in (opt, plain)]
        for step in range(steps):
            for each, optimizer in ((model, opt), (twin, plain)):
                for part in range(micro):
                    waiting: Any = contextlib.nullcontext()
                    if part < micro - 1:
                        waiting = rt.no_sync(opt) if each is ours else each.no_sync()
                    with waiting:
                        (each(batch(step * micro + part, rt.rank)).pow(2).mean() / micro).backward()
                if clip is not None and each is twin:
                    torch.nn.utils.clip_grad_norm_(each.parameters(), clip)
                elif clip is not None:
                    rt.clip_grad_norm_(opt, clip)
                optimizer.step()
                optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
            differences.append(largest_difference(ours.parameters(), theirs.parameters()))
        assert len(opt.plan.buckets) > 2
    return [differences[0], differences[-1]]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("way", ["plain", "ddp"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_equal_ddp_from_the_first_update(ranks: RankPool, schedule: str, way: str, world_size: int) -> None:
    for first, last in ranks.run(train, ranks=world_size, schedule=schedule, way=way, steps=15):
        assert first <= (0.0 if world_size == 2 else TOLERANCE)
        assert last <= (0.0 if world_size == 2 else TOLERANCE)


@pytest.mark.parametrize("partitioner", ["flat", "bucket"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cut_parameters(ranks: RankPool, schedule: str, partitioner: str) -> None:
    for found in ranks.run(train, ranks=2, schedule=schedule, way="plain", partitioner=partitioner, steps=10):
        assert found == [0.0, 0.0]


@pytest.mark.parametrize("way", ["plain", "ddp"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_accumulation_under_no_sync(ranks: RankPool, schedule: str, way: str) -> None:
    for first, last in ranks.run(train, ranks=2, schedule=schedule, way=way, steps=10, micro=3):
        assert max(first, last) <= TOLERANCE


@pytest.mark.parametrize("way", ["plain", "ddp"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parameters_that_get_no_gradient(ranks: RankPool, schedule: str, way: str) -> None:
    for found in ranks.run(train, ranks=2, schedule=schedule, way=way, steps=10, unused=True):
        assert found == [0.0, 0.0]


@pytest.mark.parametrize(
    "options", [{"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.001}]
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ddp_options(ranks: RankPool, schedule: str, options: dict[str, Any]) -> None:
    for found in ranks.run(train, ranks=2, schedule=schedule, way="ddp", steps=10, options=options):
        assert found == [0.0, 0.0]


@pytest.mark.parametrize("way", ["plain", "ddp"])
@pytest.mark.parametrize("schedule", ["sync", "bucket", "priority"])
def test_clipping_by_norm(ranks: RankPool, schedule: str, way: str) -> None:
    for first, last in ranks.run(train, ranks=2, schedule=schedule, way=way, steps=10, clip=0.05):
        assert max(first, last) <= 2e-5


def test_clipping_is_refused_where_it_cannot_be_right(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(train, ranks=2, schedule="interleaved", way="plain", steps=1, clip=1.0):
        assert outcome.error_type == "UnsupportedError"
        assert "use schedule='bucket'" in outcome.error_message


def two_backwards(schedule: str) -> float:
    """Two synchronised backwards before a step: each reduces, the second what has accumulated."""
    ours, theirs = twins(Deep)
    twin = DistributedDataParallel(theirs)
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=20) as rt:
        opt = rt.optimizer(ours.named_parameters(), torch.optim.AdamW, lr=1e-2)
        plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        for step in range(5):
            for each, optimizer in ((ours, opt), (twin, plain)):
                for part in range(2):
                    each(batch(2 * step + part, rt.rank)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return largest_difference(ours.parameters(), theirs.parameters())


@pytest.mark.parametrize("schedule", ["sync", "bucket", "priority"])
def test_two_backwards_before_a_step(ranks: RankPool, schedule: str) -> None:
    assert all(difference <= TOLERANCE for difference in ranks.run(two_backwards, ranks=2, schedule=schedule))


def test_two_backwards_are_refused_where_the_first_has_stepped(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(two_backwards, ranks=2, schedule="interleaved"):
        assert outcome.error_type in ("OptimizerError", "PeerError")
        assert "accumulate inside rt.no_sync(opt)" in outcome.error_message


def changed_gradients() -> None:
    model = Deep()
    with shardrt.Runtime(schedule="bucket", bucket_mb=0.003, timeout=20) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
        model(batch(0, rt.rank)).sum().backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        opt.step()


def test_gradients_changed_behind_the_schedule_are_noticed(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(changed_gradients, ranks=2):
        assert outcome.error_type in ("OptimizerError", "PeerError")
        assert "changed or accumulated after their reduction had started" in outcome.error_message


def two_optimizers(schedule: str) -> float:
    ours, theirs = twins(Deep)
    twin = DistributedDataParallel(theirs)
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=20) as rt:
        halves = [list(ours.named_parameters())[::2], list(ours.named_parameters())[1::2]]
        mine = [rt.optimizer(halves[0], torch.optim.AdamW, lr=1e-2), rt.optimizer(halves[1], torch.optim.SGD, lr=1e-2)]
        params = list(twin.parameters())
        plain = [torch.optim.AdamW(params[::2], lr=1e-2), torch.optim.SGD(params[1::2], lr=1e-2)]
        for step in range(8):
            for each, optimizers in ((ours, mine), (twin, plain)):
                each(batch(step, rt.rank)).pow(2).mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    return largest_difference(ours.parameters(), theirs.parameters())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_optimizers_on_one_model(ranks: RankPool, schedule: str) -> None:
    assert ranks.run(two_optimizers, ranks=2, schedule=schedule) == [0.0, 0.0]


class Counting(torch.optim.Optimizer):
    """Keeps its step count in the groups, and shrinks its steps by it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] / group["count"])


def counts_in_groups(schedule: str) -> list[float]:
    ours, theirs = twins(Deep)
    twin = DistributedDataParallel(theirs)
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=20) as rt:
        opt, plain = rt.optimizer(ours.named_parameters(), Counting, lr=0.1), Counting(twin.parameters(), lr=0.1)
        for step in range(6):
            for each, optimizer in ((ours, opt), (twin, plain)):
                each(batch(step, rt.rank)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return [largest_difference(ours.parameters(), theirs.parameters()), opt.param_groups[0]["count"]]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_optimizer_that_counts_in_its_groups(ranks: RankPool, schedule: str) -> None:
    assert ranks.run(counts_in_groups, ranks=2, schedule=schedule) == [[0.0, 6]] * 2


class Breaks(torch.autograd.Function):
    """Raises in backward, or ends the process."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: str) -> torch.Tensor:
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("broken inside backward")


class Breakable(Deep):
    """Has a place in the middle that may break."""

    how = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inlet(x))
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == 2 and self.how:
                x = Breaks.apply(x, self.how)
        return self.outlet(x)


def breaks_in_backward(schedule: str, way: str, how: str) -> None:
    inner = Breakable()
    model: Any = DistributedDataParallel(inner) if way == "ddp" else inner
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=20) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
        if way == "ddp":
            rt.attach(model, opt)
        for step in range(3):
            inner.how = how if rt.rank == 1 and step == 1 else ""
            try:
                model(batch(step, rt.rank)).sum().backward()
            except RuntimeError as error:
                if str(error) != "broken inside backward":
                    raise
            opt.step()
            opt.zero_grad()


@pytest.mark.parametrize(("schedule", "way"), [("bucket", "plain"), ("interleaved", "ddp"), ("priority", "plain")])
def test_an_error_inside_backward_ends_every_rank(ranks: RankPool, schedule: str, way: str) -> None:
    started = time.monotonic()
    outcomes = ranks.outcomes(breaks_in_backward, ranks=3, schedule=schedule, way=way, how="raised")
    assert outcomes[1].error_type == "OptimizerError" and "the last backward ended early" in outcomes[1].error_message
    for rank in (0, 2):
        assert outcomes[rank].error_type == "PeerError", outcomes[rank]
        assert "rank 1 failed" in outcomes[rank].error_message
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(("schedule", "way"), [("bucket", "ddp"), ("interleaved", "plain"), ("priority", "ddp")])
def test_a_rank_killed_inside_backward_ends_the_others(ranks: RankPool, schedule: str, way: str) -> None:
    started = time.monotonic()
    outcomes = ranks.outcomes(breaks_in_backward, ranks=3, schedule=schedule, way=way, how="killed")
    assert outcomes[1].error_type == "WorkerDied"
    for rank in (0, 2):
        assert outcomes[rank].error_type in ("CommunicationError", "PeerError"), outcomes[rank]
        assert "rank 1" in outcomes[rank].error_message
    assert time.monotonic() - started < 60


def storm(schedule: str, way: str, weather: int, steps: int) -> dict[str, Any]:
    """Random sleeps in forward, hooks and threads: how many there were, and a digest of the parameters."""
    import random

    sleeps = random.Random(f"{weather} {os.environ['RANK']}")
    torch.manual_seed(weather)
    inner = Deep(sometimes=True)
    naps = dict.fromkeys(("forward", "hooks", "threads"), 0)

    def napping(place: str) -> Any:
        def nap(*_: Any) -> None:
            if sleeps.random() < 0.05:
                naps[place] += 1
                time.sleep(sleeps.random() * 0.004)

        return nap

    for layer in inner.modules():
        layer.register_forward_hook(napping("forward"))
    model: Any = DistributedDataParallel(inner, find_unused_parameters=True) if way == "ddp" else inner
    with (
        before_each(OperationThread, "_attempt", napping("threads")),
        before_each(BucketEngine, "update", napping("threads")),
        shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=60) as rt,
    ):
        opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3)
        if way == "ddp":
            rt.attach(model, opt)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(napping("hooks"))
        for step in range(steps):
            model(batch(step, rt.rank)).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
    sums = [float(param.detach().double().sum()) for param in model.parameters()]
    return {"sums": sums, "naps": naps}


@contextlib.contextmanager
def before_each(owner: type, method: str, call: Any) -> Iterator[None]:
    """Call something before each call of a method."""
    original = getattr(owner, method)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call()
        return original(*args, **kwargs)

    setattr(owner, method, wrapped)
    try:
        yield
    finally:
        setattr(owner, method, original)


def check_storm(found: list[dict[str, Any]]) -> None:
    assert all(one["sums"] == found[0]["sums"] for one in found)
    assert all(sum(one["naps"][place] for one in found) > 0 for place in found[0]["naps"])


@pytest.mark.parametrize(("seed", "way"), [(1, "plain"), (2, "ddp")])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_small_storm(ranks: RankPool, schedule: str, seed: int, way: str) -> None:
    check_storm(ranks.run(storm, ranks=4, schedule=schedule, way=way, weather=seed, steps=15))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_storm(ranks: RankPool, schedule: str, seed: int) -> None:
    way = ("plain", "ddp")[seed % 2]
    check_storm(ranks.run(storm, ranks=4, timeout=400, schedule=schedule, way=way, weather=seed, steps=200))

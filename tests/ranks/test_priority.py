"""Gathers left to the next forward: whoever reads a parameter sees it finished, however it is read."""

from __future__ import annotations

import copy
import io
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import shardrt
from shardrt.comm.works import FinishedWork
from shardrt.optim.readers import UnfinishedBucket
from shardrt.testing import RankPool
from tests.ranks.test_overlap import Deep
from tests.ranks.twins import batch, largest_difference, twins


class SlowGather:
    """A gather that finishes when it is waited for: it shows whether anybody has."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1
        for tensor in self.tensors:
            tensor.fill_(7.0)


def unfinished(module: torch.nn.Module) -> tuple[SlowGather, list[str]]:
    params = list(module.parameters())
    work, reads = SlowGather(params), []
    UnfinishedBucket(params, work, on_read=lambda: reads.append("read"), on_failure=lambda error: None)
    return work, reads


def _saved(module: torch.nn.Module) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file, weights_only=True)["weight"]
    return loaded


READERS: dict[str, Callable[[torch.nn.Linear], Any]] = {
    "forward": lambda m: m(torch.ones(1, 3)) / 4,
    "state_dict": lambda m: m.state_dict()["weight"],
    "save": _saved,
    "deepcopy": lambda m: copy.deepcopy(m).weight,
    "data": lambda m: m.weight.data,
    "detach": lambda m: m.weight.detach(),
    "numpy": lambda m: torch.from_numpy(m.weight.detach().numpy()),
    "in a list": lambda m: torch.nn.utils.parameters_to_vector(m.parameters()),
    "foreach": lambda m: torch._foreach_mul(list(m.parameters()), 1.0)[0],
    "index": lambda m: m.weight[0],
    "functional": lambda m: torch.nn.functional.linear(torch.eye(3), m.weight),
    "functional_call": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), torch.zeros(1, 3)),
    "moving average": lambda m: torch.full((2, 3), 7.0).lerp(m.weight, 0.5),
    "iteration": lambda m: next(iter(m.weight)),
    "no_grad in place": lambda m: torch.no_grad()(lambda: m.weight.mul_(1.0))(),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_sees_finished_values(reader: str) -> None:
    module = torch.nn.Linear(3, 2)
    work, reads = unfinished(module)
    found = READERS[reader](module)
    assert torch.all(found.detach() == 7.0), found
    assert work.waited == 1 and reads == ["read"]
    assert {type(param) for param in module.parameters()} == {torch.nn.Parameter}


def test_questions_that_do_not_touch_values_are_answered_at_once() -> None:
    module = torch.nn.Linear(3, 2)
    work, _ = unfinished(module)
    weight = module.weight
    assert isinstance(weight, torch.nn.Parameter) and torch.is_tensor(weight)
    assert (weight.shape, weight.dtype, weight.numel(), weight.dim()) == ((2, 3), torch.float32, 6, 2)
    assert weight.grad is None and weight.requires_grad and weight.is_leaf and weight in {weight}
    module.zero_grad()
    weight.grad = torch.ones(2, 3)
    assert weight.device == torch.device("cpu") and repr(type(weight)) and len(weight) == 2
    module.requires_grad_(True)
    assert work.waited == 0
    assert float(weight.sum().detach()) == 42.0 and work.waited == 1


def test_a_failed_gather_reaches_every_reader() -> None:
    class Fails:
        def wait(self) -> None:
            raise shardrt.errors.CommunicationError("rank 0: all_gather from rank 1 failed; see why rank 1 ended")

    module = torch.nn.Linear(3, 2)
    told: list[Exception] = []
    UnfinishedBucket(list(module.parameters()), Fails(), on_read=lambda: None, on_failure=told.append)
    for _ in range(2):
        with pytest.raises(shardrt.errors.CommunicationError, match="all_gather from rank 1 failed"):
            module(torch.ones(1, 3))
    assert told


def test_a_gather_that_was_done_costs_a_reader_nothing_twice() -> None:
    module = torch.nn.Linear(3, 2)
    bucket = UnfinishedBucket(list(module.parameters()), FinishedWork(), on_read=list, on_failure=lambda error: None)
    assert bucket.finish() is True
    assert bucket.finish() is False


class Backwards(torch.nn.Module):
    """Reads its layers in another order than the one in which it registered them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(19, 19) for _ in range(6))
        self.inlet, self.outlet = torch.nn.Linear(7, 19), torch.nn.Linear(19, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inlet(x))
        for index in (3, 1, 5, 0, 2, 4):
            x = torch.tanh(self.layers[index](x))
        return self.outlet(x)


def between_steps() -> float:
    """Evaluation, saving, averaging and clamping between steps."""
    ours, theirs = twins(Backwards)
    twin = DistributedDataParallel(theirs)
    found: list[float] = []
    with shardrt.Runtime(schedule="priority", bucket_mb=0.001, timeout=20) as rt:
        opt = rt.optimizer(ours.named_parameters(), torch.optim.AdamW, lr=1e-2)
        plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        averages = [copy.deepcopy(each) for each in (ours, theirs)]
        for step in range(9):
            for each, optimizer in ((ours, opt), (twin, plain)):
                each(batch(step, rt.rank)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for average, each in zip(averages, (ours, theirs), strict=True):
                    for mean, param in zip(average.parameters(), each.parameters(), strict=True):
                        mean.lerp_(param, 0.1)
                    each.layers[0].weight.clamp_(-0.2, 0.2)
                found.append(float((ours(batch(99, 0)) - theirs(batch(99, 0))).abs().max()))
            states = [each.state_dict() for each in (ours, theirs)]
            found.append(max(float((states[0][name] - states[1][name]).abs().max()) for name in states[0]))
        rt.finish(opt)
        found.append(largest_difference(averages[0].parameters(), averages[1].parameters()))
    return max(found)


def test_what_happens_between_steps_sees_finished_parameters(ranks: RankPool) -> None:
    assert ranks.run(between_steps, ranks=2) == [0.0, 0.0]


def reading_order() -> list[list[int]]:
    """Where in the order of gathers the layers are, as forward reads them."""
    torch.manual_seed(0)
    model = Backwards()
    places = []
    with shardrt.Runtime(schedule="priority", bucket_mb=0.001, timeout=20) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=1e-2)
        buckets = [bucket.params for bucket in opt.plan.buckets]
        read = [next(i for i, names in enumerate(buckets) if f"layers.{at}.weight" in names) for at in (3, 1, 5, 0)]
        for step in range(4):
            model(batch(step, rt.rank)).pow(2).mean().backward()
            opt.step()
            order = opt.engine._reading._order  # type: ignore[attr-defined]
            places.append([list(order).index(bucket) for bucket in read])
            opt.zero_grad()
    return places


def test_gathers_follow_the_order_of_the_forward_once_it_is_known(ranks: RankPool) -> None:
    for places in ranks.run(reading_order, ranks=2):
        assert places[0] != sorted(places[0])
        assert places[-1] == sorted(places[-1])


def compiled() -> list[Any]:
    ours, theirs = twins(Deep)
    twin = DistributedDataParallel(theirs)
    calls: list[int] = []

    def counting(graph: Any, _: Any) -> Any:
        calls.append(1)
        return graph.forward

    model = torch.compile(ours, backend=counting)
    with shardrt.Runtime(schedule="priority", bucket_mb=0.003, timeout=20) as rt:
        opt = rt.optimizer(ours.named_parameters(), torch.optim.SGD, lr=1e-2)
        plain = torch.optim.SGD(twin.parameters(), lr=1e-2)
        for step in range(5):
            for each, optimizer in ((model, opt), (twin, plain)):
                each(batch(step, rt.rank)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return [largest_difference(ours.parameters(), theirs.parameters()), len(calls)]


def test_a_compiled_model_is_compiled_once(ranks: RankPool) -> None:
    for difference, calls in ranks.run(compiled, ranks=2, timeout=120):
        assert difference <= 1e-6
        assert calls == 1


def killed_before_the_gather(victim: int) -> str:
    """One rank is gone when the others read what it was to send."""
    model = Deep()
    with shardrt.Runtime(schedule="priority", bucket_mb=0.003, timeout=10) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
        for step in range(4):
            model(batch(step, rt.rank)).sum().backward()
            if step == 2 and rt.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            opt.step()
            opt.zero_grad()
    return "finished"


def test_a_lost_rank_ends_the_others(ranks: RankPool) -> None:
    started = time.monotonic()
    outcomes = ranks.outcomes(killed_before_the_gather, ranks=3, victim=1)
    assert outcomes[1].error_type == "WorkerDied"
    for rank in (0, 2):
        assert outcomes[rank].error_type in ("CommunicationError", "PeerError"), outcomes[rank]
        assert "rank 1" in outcomes[rank].error_message
    assert time.monotonic() - started < 40

"""Loops that do something unusual between backward and step: right, or an error on every rank; never silently wrong."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import shardrt
from shardrt.testing import RankPool
from tests.ranks.test_overlap import Deep
from tests.ranks.twins import batch, largest_difference, twins

OVERLAPPING = ["bucket", "interleaved", "priority"]


def reduce_by_hand(model: torch.nn.Module) -> None:
    """For a twin: what DDP would have done."""
    for param in model.parameters():
        if param.grad is not None:
            torch.distributed.all_reduce(param.grad)
            param.grad /= torch.distributed.get_world_size()


def dropped_backward(schedule: str) -> float:
    """A batch whose gradients are thrown away, with ranks that are never equally fast."""
    ours, theirs = twins(Deep)
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=15) as rt:
        opt = rt.optimizer(ours.named_parameters(), torch.optim.AdamW, lr=1e-2)
        plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
        for step in range(12):
            for each, optimizer in ((ours, opt), (theirs, plain)):
                each(batch(step, rt.rank)).pow(2).mean().backward()
                if step % 3 != 1:
                    if each is theirs:
                        reduce_by_hand(theirs)
                    optimizer.step()
                optimizer.zero_grad()
            time.sleep(0.003 * ((step + rt.rank) % 2))
    return largest_difference(ours.parameters(), theirs.parameters())


@pytest.mark.parametrize("schedule", ["sync", "bucket", "priority"])
def test_a_backward_without_a_step(ranks: RankPool, schedule: str) -> None:
    assert ranks.run(dropped_backward, ranks=2, schedule=schedule) == [0.0, 0.0]


def between(schedule: str, what: str) -> None:
    """Do something between backward and step, in the second iteration."""
    model = Deep()
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=15) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
        for step in range(2):
            model(batch(step, rt.rank)).sum().backward()
            if step and what == "replace":
                for param in model.parameters():
                    param.grad = torch.zeros_like(param)
            elif step and what == "remove":
                model.zero_grad()
            elif step and what == "learning rate":
                opt.param_groups[0]["lr"] = 0.2
            elif step and what == "group":
                opt.add_param_group({"params": [("late", torch.nn.Parameter(torch.ones(3)))]})
            opt.step()
            opt.zero_grad()


@pytest.mark.parametrize(
    ("schedule", "what", "message"),
    [
        *((schedule, what, "changed or accumulated") for schedule in OVERLAPPING for what in ("replace", "remove")),
        ("interleaved", "learning rate", "change them before backward or after step"),
        ("interleaved", "group", "call it after step()"),
        ("priority", "group", "call it after step()"),
    ],
)
def test_what_comes_too_late_is_refused(ranks: RankPool, schedule: str, what: str, message: str) -> None:
    for outcome in ranks.outcomes(between, ranks=2, schedule=schedule, what=what):
        assert outcome.error_type in ("OptimizerError", "PeerError"), outcome
        assert message in outcome.error_message


@pytest.mark.parametrize("schedule", ["sync", "bucket", "priority"])
def test_a_learning_rate_set_just_before_the_step_counts(ranks: RankPool, schedule: str) -> None:
    ranks.run(between, ranks=2, schedule=schedule, what="learning rate")


def replaced_optimizer(schedule: str) -> list[Any]:
    """A new optimizer for the same parameters while something still holds the old one, on one rank only."""
    ours, theirs = twins(Deep)
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=15) as rt:
        old = rt.optimizer(ours.named_parameters(), torch.optim.SGD, lr=0.1)
        kept = [old] if rt.rank == 0 else []
        del old
        opt = rt.optimizer(ours.named_parameters(), torch.optim.AdamW, lr=1e-2)
        plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
        for step in range(4):
            for each, optimizer in ((ours, opt), (theirs, plain)):
                each(batch(step, rt.rank)).pow(2).mean().backward()
                if each is theirs:
                    reduce_by_hand(theirs)
                    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1e-3)
                else:
                    rt.clip_grad_norm_(ours, 1e-3)
                optimizer.step()
                optimizer.zero_grad()
        said = ""
        if kept and schedule != "sync":
            with pytest.raises(shardrt.errors.OptimizerError, match="another optimizer has been made") as caught:
                kept[0].step()
            said = str(caught.value)
    return [largest_difference(ours.parameters(), theirs.parameters()), said]


@pytest.mark.parametrize("schedule", ["sync", "bucket", "priority"])
def test_a_second_optimizer_takes_over(ranks: RankPool, schedule: str) -> None:
    for difference, _ in ranks.run(replaced_optimizer, ranks=2, schedule=schedule):
        assert difference <= 2e-5


def frozen_with_uneven_gradients(schedule: str) -> float:
    """A layer that one rank alone used is frozen while its gradient is still there."""
    ours, theirs = twins(Deep)
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=15) as rt:
        opt = rt.optimizer(ours.named_parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        plain = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            for each, optimizer in ((ours, opt), (theirs, plain)):
                each.layers[0].requires_grad_(step < 2)
                x = torch.tanh(each.inlet(batch(step, rt.rank)))
                x = torch.tanh(each.layers[0](x)) if rt.rank == 0 else x
                for layer in each.layers[1:]:
                    x = torch.tanh(layer(x))
                each.outlet(x).pow(2).mean().backward()
                if each is theirs:
                    for param in each.parameters():
                        if param.grad is None and step < 2:
                            param.grad = torch.zeros_like(param)
                    reduce_by_hand(theirs)
                optimizer.step()
                optimizer.zero_grad()
    return largest_difference(ours.parameters(), theirs.parameters())


@pytest.mark.parametrize("schedule", ["sync", "bucket", "interleaved"])
def test_freezing_what_one_rank_alone_used(ranks: RankPool, schedule: str) -> None:
    assert ranks.run(frozen_with_uneven_gradients, ranks=2, schedule=schedule) == [0.0, 0.0]


def fails_while_the_other_clips() -> str:
    model = Deep()
    with shardrt.Runtime(schedule="bucket", bucket_mb=0.003, timeout=60) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
        model(batch(0, rt.rank)).sum().backward()
        if rt.rank == 1:
            rt.clip_grad_norm_(opt, 1.0)
            rt.report_failure(RuntimeError("the loader of rank 1 is out of data"))
            return "failed"
        started = time.monotonic()
        rt.clip_grad_norm_(opt, 1.0)
        with pytest.raises(shardrt.errors.PeerError, match="out of data"):
            rt.clip_grad_norm_(opt, 1.0)
        assert time.monotonic() - started < 20
    return "heard of it"


def test_a_small_collective_hears_of_a_failed_peer(ranks: RankPool) -> None:
    assert ranks.run(fails_while_the_other_clips, ranks=2) == ["heard of it", "failed"]


def one_rank_differs(what: str) -> None:
    inner = Deep()
    model = torch.nn.parallel.DistributedDataParallel(inner)
    with shardrt.Runtime(schedule="bucket", bucket_mb=0.003, timeout=15) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
        if what == "hook" and rt.rank == 1:
            rt.attach(model, opt, hook=default_hooks.fp16_compress_hook)
        else:
            rt.attach(model, opt)
        for step in range(3):
            if what == "freeze" and rt.rank == 1 and step == 1:
                inner.layers[0].weight.requires_grad_(False)
            if what == "raise" and rt.rank == 1 and step == 1:
                raise ValueError("bad batch")
            model(batch(step, rt.rank)).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("hook", "ranks disagree at 'attach' on hook"),
        ("freeze", "parameters that are frozen"),
        # DDP's own collective waits for a worker that lives on after its error, so this takes its time.
        pytest.param("raise", "bad batch", marks=pytest.mark.long),
    ],
)
def test_one_rank_goes_another_way(ranks: RankPool, what: str, text: str) -> None:
    for outcome in ranks.outcomes(one_rank_differs, ranks=2, what=what):
        assert text in outcome.error_message, outcome


def test_calls_on_the_wrong_things_say_so() -> None:
    model = torch.nn.Linear(2, 2)
    with shardrt.Runtime(schedule="priority") as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(shardrt.errors.ConfigError, match="no optimizer of this runtime trains any parameter"):
            rt.clip_grad_norm_(torch.nn.Linear(2, 2), 1.0)
        with pytest.raises(shardrt.errors.ConfigError, match="state=1 and no hook"):
            rt.attach(torch.nn.Module(), opt, state=1)  # type: ignore[arg-type]
        with pytest.raises(shardrt.errors.ConfigError, match=r"unknown use 'cliping'.*did you mean 'clipping'"):
            rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1, uses=["cliping"])

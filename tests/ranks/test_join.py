"""Ranks with uneven inputs train together: every schedule, plain and under DDP, equals the documented average."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import shardrt
from shardrt.errors import ShardrtError
from shardrt.testing import RankPool
from tests.ranks.twins import batch, largest_difference, twins
from tests.ranks.uneven import BATCHES, SCHEDULES, WAYS, Layers, average_over, loss_of, train

TOLERANCE = 2e-5
"""Of clipping and accumulation, where sums are formed in another order."""
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
each_way = pytest.mark.parametrize("way", WAYS)


@each_way
@each_schedule
def test_uneven_ranks_equal_the_average_over_those_with_inputs(ranks: RankPool, schedule: str, way: str) -> None:
    found = ranks.run(train, ranks=4, schedule=schedule, way=way)
    assert [one["difference"] for one in found] == [0.0] * 4
    assert [one["done"] for one in found] == list(BATCHES)
    assert all(one["steps"] == 11 and one["moved"] > 0.01 for one in found)


@pytest.mark.parametrize(
    ("policy", "schedule", "way"),
    [
        ("all", "sync", "plain"),
        ("all", "interleaved", "ddp"),
        *(("shortest", schedule, way) for schedule in SCHEDULES for way in WAYS),
    ],
)
def test_other_policies(ranks: RankPool, schedule: str, policy: str, way: str) -> None:
    found = ranks.run(train, ranks=4, schedule=schedule, way=way, policy=policy, batches=[2, 4, 4, 5], epochs=2)
    assert [one["difference"] for one in found] == [0.0] * 4
    assert {one["steps"] for one in found} == {4 if policy == "shortest" else 10}
    assert all(one["moved"] > 0.01 for one in found)


@each_way
@each_schedule
def test_schedulers_that_step_per_batch_are_followed_and_carried(ranks: RankPool, schedule: str, way: str) -> None:
    found = ranks.run(train, ranks=3, schedule=schedule, way=way, batches=[1, 4, 2], per_batch=True, epochs=3)
    assert [one["difference"] for one in found] == [0.0] * 3
    assert all(one["lr"][0] == one["lr"][1] and one["scheduler"] == [12, 12] for one in found)


@each_way
@each_schedule
def test_a_rank_without_any_input_and_accumulation(ranks: RankPool, schedule: str, way: str) -> None:
    for batches in ([0, 3, 2], [2, 0, 3]):
        found = ranks.run(train, ranks=3, schedule=schedule, way=way, batches=batches, parts=3, epochs=2)
        assert max(one["difference"] for one in found) <= TOLERANCE
        assert {one["steps"] for one in found} == {6}


@pytest.mark.parametrize("schedule", ["sync", "interleaved"])
def test_sums_are_not_divided(ranks: RankPool, schedule: str) -> None:
    found = ranks.run(train, ranks=3, schedule=schedule, way="plain", batches=[1, 3, 2], gradients="sum")
    assert [one["difference"] for one in found] == [0.0] * 3


@each_way
@pytest.mark.parametrize("schedule", ["sync", "bucket", "priority"])
def test_clipping(ranks: RankPool, schedule: str, way: str) -> None:
    found = ranks.run(train, ranks=3, schedule=schedule, way=way, batches=[1, 4, 3], clip=0.05, epochs=2)
    assert max(one["difference"] for one in found) <= TOLERANCE


@pytest.mark.parametrize("schedule", ["sync", "interleaved"])
def test_layers_that_rest_under_find_unused_parameters(ranks: RankPool, schedule: str) -> None:
    for static in (False, True):
        options = {"static_graph": True} if static else {"find_unused_parameters": True, "rests": True}
        found = ranks.run(train, ranks=3, schedule=schedule, way="ddp", batches=[2, 9, 5], **options)
        assert [one["difference"] for one in found] == [0.0] * 3


@each_schedule
def test_cut_parameters_and_another_backend(ranks: RankPool, schedule: str) -> None:
    found = ranks.run(train, ranks=2, schedule=schedule, way="plain", batches=[5, 2], partitioner="flat")
    assert [one["difference"] for one in found] == [0.0] * 2
    found = ranks.run(train, ranks=2, schedule=schedule, way="ddp", batches=[1, 4], backend="reference")
    assert [one["difference"] for one in found] == [0.0] * 2


def keeps_statistics(schedule: str, batches: list[int]) -> dict[str, Any]:
    """BatchNorm under DDP, with an evaluation inside the block."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
    with shardrt.Runtime(schedule=schedule, timeout=20) as rt:
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        opt = rt.optimizer(ddp.named_parameters(), torch.optim.SGD, lr=0.1)
        rt.attach(ddp, opt)
        for epoch in range(2):
            with rt.join(ddp):
                for step in range(batches[rt.rank]):
                    ddp(batch(10 * epoch + step, rt.rank)).pow(2).mean().backward()
                    opt.step()
                    opt.zero_grad()
                    if step == 1:
                        with torch.no_grad():
                            ddp(batch(5, rt.rank))
    return {
        "mean": model[1].running_mean.tolist(),
        "seen": int(model[1].num_batches_tracked),
        "weight": model[0].weight.flatten().tolist(),
    }


@each_schedule
def test_buffers_of_ddp_are_those_of_a_rank_that_trained_longest(ranks: RankPool, schedule: str) -> None:
    found = ranks.run(keeps_statistics, ranks=3, schedule=schedule, batches=[2, 4, 3])
    assert found[0] == found[1] == found[2]
    assert found[0]["seen"] == 10  # four batches and an evaluation in training mode, twice


def scales(batches: list[int], schedule: str, policy: str = "active") -> dict[str, Any]:
    """A GradScaler, with an infinity that skips a step while a rank has run out."""
    ours, theirs = twins(Layers)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=20) as rt:
        opt = rt.optimizer(ours.named_parameters(), torch.optim.SGD, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
        with rt.join(opt, policy=policy, carry=[scaler]):
            for step in range(batches[rt.rank]):
                loss = loss_of(ours, step, rt.rank)
                scaler.scale(loss * float("inf") if step == 2 else loss).backward()
                scaler.unscale_(opt)
                rt.clip_grad_value_(ours, 0.05)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
        for step in range(min(batches) if policy == "shortest" else max(batches)):
            active = [rank for rank, count in enumerate(batches) if step < count]
            average_over(theirs, [lambda rank=rank: loss_of(theirs, step, rank) for rank in active], len(active))  # noqa: B023
            torch.nn.utils.clip_grad_value_(theirs.parameters(), 0.05)
            if step != 2:
                plain.step()
        return {
            "difference": largest_difference(ours.parameters(), theirs.parameters()),
            "scale": scaler.get_scale(),
            "steps": opt._steps,
        }


@pytest.mark.parametrize("schedule", ["sync", "bucket", "priority"])
def test_a_grad_scaler_is_followed_and_carried(ranks: RankPool, schedule: str) -> None:
    found = ranks.run(scales, ranks=3, schedule=schedule, batches=[2, 5, 4])
    assert max(one["difference"] for one in found) <= TOLERANCE
    assert found[0]["scale"] == found[1]["scale"] == found[2]["scale"]
    assert {one["steps"] for one in found} == {4}


@pytest.mark.parametrize("schedule", ["sync", "bucket"])
def test_all_stop_after_a_step_that_was_skipped(ranks: RankPool, schedule: str) -> None:
    found = ranks.run(scales, ranks=3, schedule=schedule, batches=[3, 5, 4], policy="shortest")
    assert max(one["difference"] for one in found) <= TOLERANCE
    assert {one["steps"] for one in found} == {2}


def two_optimizers(batches: list[int]) -> float:
    """Two optimizers, one part of which is clipped, one batch dropped after clipping, a layer frozen half-way."""
    ours, theirs = twins(Layers)
    with shardrt.Runtime(timeout=20) as rt:
        made = [
            rt.optimizer(ours.layers.named_parameters(), torch.optim.SGD, lr=0.1, momentum=0.9),
            rt.optimizer([*ours.inlet.named_parameters("in"), *ours.outlet.named_parameters("out")], torch.optim.AdamW),
        ]
        plain = [
            torch.optim.SGD(theirs.layers.parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW([*theirs.inlet.parameters(), *theirs.outlet.parameters()]),
        ]
        with rt.join(ours):
            for step in range(batches[rt.rank]):
                ours.layers[0].requires_grad_(step < 3)
                loss_of(ours, step, rt.rank).backward()
                rt.clip_grad_norm_(ours.outlet, 1e-3)
                if step == 2:  # dropped
                    for optimizer in made:
                        optimizer.zero_grad()
                for optimizer in made:
                    optimizer.step()
                for optimizer in made:
                    optimizer.zero_grad()
        for step in range(max(batches)):
            theirs.layers[0].requires_grad_(step < 3)
            active = [rank for rank, count in enumerate(batches) if step < count]
            average_over(theirs, [lambda rank=rank: loss_of(theirs, step, rank) for rank in active], len(active))  # noqa: B023
            torch.nn.utils.clip_grad_norm_(theirs.outlet.parameters(), 1e-3)
            if step == 2:
                theirs.zero_grad()
            for optimizer in plain:
                optimizer.step()
            theirs.zero_grad()
        return largest_difference(ours.parameters(), theirs.parameters())


def test_several_optimizers_parts_of_a_model_dropped_batches_and_freezing(ranks: RankPool) -> None:
    assert max(ranks.run(two_optimizers, ranks=3, batches=[1, 5, 4])) <= TOLERANCE


def leaves_half_way(schedule: str) -> dict[str, Any]:
    """Two synchronised backwards per step, and a rank whose inputs end between them."""
    ours, theirs = twins(Layers)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    with shardrt.Runtime(schedule=schedule, bucket_mb=0.003, timeout=20) as rt:
        opt = rt.optimizer(ours.named_parameters(), torch.optim.SGD, lr=0.1)
        with rt.join(opt):
            for step in range([3, 6][rt.rank]):
                loss_of(ours, step, rt.rank).backward()
                if step % 2:
                    opt.step()
                    opt.zero_grad()

        def two_losses(first: int, rank: int) -> torch.Tensor:
            return loss_of(theirs, first, rank) + loss_of(theirs, first + 1, rank)

        for first in (0, 2, 4):
            active = [0, 1] if first == 0 else [1]
            average_over(theirs, [lambda rank=rank: two_losses(first, rank) for rank in active], len(active))  # noqa: B023
            plain.step()
        again = loss_of(ours, 50, rt.rank)  # training goes on as ever
        again.backward()
        opt.step()
        average_over(theirs, [lambda rank=rank: loss_of(theirs, 50, rank) for rank in (0, 1)], 2)
        plain.step()
        return {"difference": largest_difference(ours.parameters(), theirs.parameters()), "steps": opt._steps}


@pytest.mark.parametrize("schedule", ["sync", "bucket", "priority"])
def test_a_rank_that_leaves_between_two_backwards_takes_its_part_back(ranks: RankPool, schedule: str) -> None:
    for found in ranks.run(leaves_half_way, ranks=2, schedule=schedule):
        assert found["difference"] <= TOLERANCE and found["steps"] == 4


class EveryOther:
    """A policy of the user's own: half a word, and an end."""

    name = "every-other"

    def goes_on(self, active: int, world_size: int) -> bool:
        return active > 1

    def divisor(self, active: int, world_size: int) -> int:
        return 2 * active


def own_policy() -> list[Any]:
    ours, theirs = twins(Layers)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    with shardrt.Runtime(schedule="bucket", timeout=20) as rt:
        opt = rt.optimizer(ours.named_parameters(), torch.optim.SGD, lr=0.1)
        done = 0
        with rt.join(opt, policy=EveryOther()):
            for step in range([1, 3, 9][rt.rank]):
                try:
                    loss_of(ours, step, rt.rank).backward()
                    opt.step()
                except Exception:
                    continue  # a loop that passes over bad batches
                opt.zero_grad()
                done += 1
        for step, active in enumerate(([0, 1, 2], [1, 2], [1, 2])):
            average_over(theirs, [lambda rank=rank: loss_of(theirs, step, rank) for rank in active], 2 * len(active))  # noqa: B023
            plain.step()
        return [largest_difference(ours.parameters(), theirs.parameters()), done]


def test_a_policy_of_the_users_own(ranks: RankPool) -> None:
    assert ranks.run(own_policy, ranks=3) == [[0.0, 1], [0.0, 3], [0.0, 3]]


def refused(case: str) -> str:
    """What is said of something that cannot be."""
    model = torch.nn.Linear(3, 3)
    with shardrt.Runtime(schedule="bucket" if case == "two" else "sync", timeout=20) as rt:
        gradients = "reduced" if case == "reduced" else "average"
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1, gradients=gradients)
        other = torch.nn.Linear(2, 2)
        targets: dict[str, Any] = {
            "nothing": (),
            "reduced": (opt,),
            "two": (opt, rt.optimizer(other.named_parameters("other"), torch.optim.SGD, lr=0.1)),
            "torch": (torch.optim.SGD(model.parameters(), lr=0.1),),
            "ddp": (DistributedDataParallel(model),),
            "policy": (opt,),
            "carry": (opt,),
            "differs": (opt,),
            "twice": (opt,),
        }
        policy: Any = "actve" if case == "policy" else "active"
        if case == "differs":
            policy = ("active", "all")[rt.rank]
        try:
            with rt.join(*targets[case], policy=policy, carry=[object()] if case == "carry" else ()):
                if case == "twice":
                    rt.join(opt)
        except ShardrtError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was said"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("nothing", "rt.join(opt)"),
        ("reduced", "rt.attach(ddp, opt)"),
        ("two", "schedule='sync'"),
        ("torch", "made by rt.optimizer"),
        ("ddp", "attach it before"),
        ("policy", "did you mean 'active'?"),
        ("carry", "state_dict"),
        ("differs", "policy"),
        ("twice", "do not go into one another"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(ranks: RankPool, case: str, said: str) -> None:
    for message in ranks.run(refused, ranks=2, case=case):
        assert said in message, message

"""An ordinary optimizer to everything around it: groups, schedulers, closures, hooks, freezing, accumulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import shardrt
from shardrt.testing import RankPool
from tests.ranks.twins import Odd, average_backward, batch, largest_difference, twins

PARTITIONERS = ["greedy", "flat", "bucket"]


class Pair:
    """A sharded model and its twin, driven in step."""

    def __init__(
        self,
        partitioner: str,
        *,
        build: Callable[[], torch.nn.Module] = Odd,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        groups: Callable[[torch.nn.Module], Any] = lambda model: model.named_parameters(),
        options: dict[str, Any] | None = None,
        **defaults: Any,
    ) -> None:
        self.rt = shardrt.Runtime(partitioner=partitioner, timeout=20)
        self.model, self.twin = twins(build)
        defaults = defaults or {"lr": 1e-2, "weight_decay": 0.1}
        self.opt = self.rt.optimizer(groups(self.model), optimizer, **(options or {}), **defaults)
        self.plain = optimizer(groups(self.twin), **defaults)

    def loss(self, model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(batch(step, rank)).pow(2).mean()

    def backward(self, step: int) -> None:
        average_backward(self.twin, lambda rank: self.loss(self.twin, step, rank), self.rt.world_size)
        self.loss(self.model, step, self.rt.rank).backward()

    def step(self) -> None:
        self.opt.step()
        self.plain.step()

    def zero(self, set_to_none: bool = True) -> None:
        self.opt.zero_grad(set_to_none=set_to_none)
        self.plain.zero_grad(set_to_none=set_to_none)

    def train(self, steps: range) -> None:
        for step in steps:
            self.backward(step)
            self.step()
            self.zero()

    def difference(self) -> float:
        found = largest_difference(self.model.parameters(), self.twin.parameters())
        self.rt.close()
        return found


def _two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    decayed = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    others = [(n, p) for n, p in model.named_parameters() if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.2}, {"params": others, "lr": 3e-2, "weight_decay": 0.0}]


def groups_and_schedulers(partitioner: str) -> float:
    pair = Pair(partitioner, groups=_two_groups)
    make = [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.2], total_steps=12),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=6),
    ]
    for scheduler in make:
        ours, theirs = scheduler(pair.opt), scheduler(pair.plain)
        for step in range(6):
            pair.train(range(step, step + 1))
            ours.step()
            theirs.step()
            assert [g["lr"] for g in pair.opt.param_groups] == [g["lr"] for g in pair.plain.param_groups]
            assert [g["betas"] for g in pair.opt.param_groups] == [g["betas"] for g in pair.plain.param_groups]
    return pair.difference()


def closures_and_hooks(partitioner: str) -> float:
    pair = Pair(partitioner)
    seen: list[str] = []
    pair.opt.register_step_pre_hook(lambda *_: seen.append("before"))
    pair.opt.register_step_post_hook(lambda *_: seen.append("after"))
    everywhere = register_optimizer_step_pre_hook(lambda *_: seen.append("all"))
    for step in range(5):

        def ours(step: int = step) -> torch.Tensor:
            pair.opt.zero_grad()
            loss = pair.loss(pair.model, step, pair.rt.rank)
            loss.backward()
            return loss

        seen.clear()
        loss = pair.opt.step(ours)
        assert isinstance(loss, torch.Tensor) and loss.requires_grad
        assert seen == ["all", "before", "after"], seen
        pair.plain.zero_grad()
        average_backward(pair.twin, lambda rank: pair.loss(pair.twin, step, rank), pair.rt.world_size)  # noqa: B023
        pair.plain.step()
    everywhere.remove()
    return pair.difference()


def freezing_and_thawing(partitioner: str) -> float:
    pair = Pair(partitioner)
    pair.train(range(3))
    for model in (pair.model, pair.twin):
        model.embed.weight.requires_grad_(False)
        model.frozen.requires_grad_(True)
    pair.train(range(3, 6))
    assert len(pair.opt.plan.buckets[0].params) == len([p for p in pair.model.parameters() if p.requires_grad])
    for model in (pair.model, pair.twin):
        model.embed.weight.requires_grad_(True)
        model.out.requires_grad_(False)
    pair.train(range(6, 9))
    return pair.difference()


def added_group(partitioner: str) -> float:
    pair = Pair(partitioner, groups=lambda model: list(model.embed.named_parameters()))
    pair.train(range(2))
    pair.model.zero_grad()
    pair.twin.zero_grad()
    owners = {shard: shard.rank for shard in pair.opt.plan.partition.shards}
    for model, opt in ((pair.model, pair.opt), (pair.twin, pair.plain)):
        more = [(f"more.{n}", p) for n, p in model.named_parameters() if not n.startswith("embed")]
        opt.add_param_group({"params": more, "lr": 5e-3})
    assert all(shard in pair.opt.plan.partition.shards for shard in owners)
    assert len(pair.opt.param_groups) == 2 and pair.opt.param_groups[1]["betas"] == (0.9, 0.999)
    pair.train(range(2, 6))
    return pair.difference()


def accumulation(partitioner: str) -> float:
    pair = Pair(partitioner)
    for step in range(0, 6, 2):
        pair.backward(step)
        pair.backward(step + 1)
        pair.step()
        pair.zero(set_to_none=False)
    pair.backward(6)
    pair.step()
    pair.backward(7)  # nobody cleared the gradients: they add up, as always
    pair.step()
    pair.step()  # and without a new backward they are stepped again
    return pair.difference()


def replaced_data(partitioner: str) -> float:
    pair = Pair(partitioner)
    pair.train(range(2))
    for model in (pair.model, pair.twin):
        model.inner.weight.data = model.inner.weight.data.clone() * 2
        with torch.no_grad():
            model.out.weight.mul_(0.5)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(state)
    pair.train(range(2, 5))
    return pair.difference()


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "scenario",
    [groups_and_schedulers, closures_and_hooks, freezing_and_thawing, added_group, accumulation, replaced_data],
)
def test_scenario(ranks: RankPool, scenario: Callable[[str], float], world_size: int, partitioner: str) -> None:
    tolerance = 0.0 if world_size == 2 else 2e-6
    # Where gradients are left to add up, the twin adds averages and we average sums: the same number, rounded apart.
    tolerance = 2e-6 if scenario is accumulation else tolerance
    for difference in ranks.run(scenario, ranks=world_size, partitioner=partitioner):
        assert difference <= tolerance


class Branches(torch.nn.Module):
    """Each rank uses another branch; the last is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(7, 5) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[0](x) + self.branches[self.chosen](x)

    chosen = 0


class BranchPair(Pair):
    def loss(self, model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
        model.chosen = min((rank + step) % 3, 2)  # type: ignore[assignment]
        return super().loss(model, step, rank)


def missing_gradients(partitioner: str) -> tuple[float, bool]:
    pair = BranchPair(partitioner, build=Branches)
    untouched = pair.model.branches[3].weight.detach().clone()
    pair.train(range(8))
    return pair.difference(), torch.equal(untouched, pair.model.branches[3].weight)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_that_only_some_ranks_use(ranks: RankPool, world_size: int, partitioner: str) -> None:
    for difference, untouched in ranks.run(missing_gradients, ranks=world_size, partitioner=partitioner):
        assert difference <= (0.0 if world_size == 2 else 2e-6)
        assert untouched, "weight decay must not touch what got no gradient on any rank"


class Mixed(torch.nn.Module):
    """Several dtypes, a complex parameter, and a convolution in channels-last layout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.wide = torch.nn.Linear(7, 3, dtype=torch.float64)
        self.low = torch.nn.Parameter(torch.randn(11, dtype=torch.bfloat16))
        self.phase = torch.nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.transposed = torch.nn.Parameter(torch.randn(6, 4).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x[:, :3, None, None].expand(-1, 3, 5, 5).contiguous()
        total = self.conv(image).sum() + self.wide(x.double()).sum().float() + (self.low.float() * x.sum()).sum()
        return 0.01 * (total + (self.phase * x.mean()).abs().sum() + (self.transposed * x.std()).sum())


def mixed_dtypes(partitioner: str) -> tuple[float, list[Any]]:
    pair = Pair(partitioner, build=Mixed, optimizer=torch.optim.SGD, lr=1e-3, momentum=0.9)
    pair.train(range(6))
    strides = [list(pair.model.conv.weight.stride()), list(pair.model.transposed.stride())]
    return pair.difference(), strides


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_mixed_dtypes_and_layouts(ranks: RankPool, world_size: int, partitioner: str) -> None:
    _, twin = twins(Mixed)
    for difference, strides in ranks.run(mixed_dtypes, ranks=world_size, partitioner=partitioner):
        assert strides == [list(twin.conv.weight.stride()), list(twin.transposed.stride())]
        assert difference <= (0.0 if world_size == 2 else 1e-2)  # bfloat16 rounds at 2^-8


def few_parameters(partitioner: str) -> float:
    pair = Pair(partitioner, build=lambda: torch.nn.Linear(7, 1, bias=False))
    pair.train(range(4))
    return pair.difference()


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_more_ranks_than_parameters(ranks: RankPool, partitioner: str) -> None:
    assert all(difference <= 2e-6 for difference in ranks.run(few_parameters, ranks=4, partitioner=partitioner))


def unnamed_and_generators() -> list[float]:
    found = []
    for groups in (
        lambda model: model.parameters(),
        lambda model: list(model.parameters()),
        lambda model: [{"params": model.embed.parameters()}, {"params": [model.out.weight], "lr": 0.1}],
        lambda model: (pair for pair in model.named_parameters()),
    ):
        pair = Pair("greedy", groups=groups)
        pair.train(range(3))
        found.append(pair.difference())
    return found


def test_every_way_to_list_parameters(ranks: RankPool) -> None:
    for found in ranks.run(unnamed_and_generators, ranks=2):
        assert found == [0.0] * 4


def state_is_visible(partitioner: str) -> list[int]:
    pair = Pair(partitioner)
    pair.train(range(2))
    whole = [param for param in pair.model.parameters() if param in pair.opt.state]
    for param in whole:
        theirs = pair.plain.state[dict(zip(pair.model.parameters(), pair.twin.parameters(), strict=True))[param]]
        assert torch.equal(pair.opt.state[param]["exp_avg"], theirs["exp_avg"])
    pair.rt.close()
    return [len(whole), pair.opt.state_bytes()]


def test_state_of_whole_parameters_is_found_by_parameter(ranks: RankPool) -> None:
    found = ranks.run(state_is_visible, ranks=2, partitioner="greedy")
    trained = sum(1 for param in Odd().parameters() if param.requires_grad)
    assert sum(count for count, _ in found) == trained - 2  # all but the two that never got a gradient

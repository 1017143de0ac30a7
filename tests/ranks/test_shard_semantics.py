"""Whatever a training loop does with a sharded module means what it means without sharding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardrt
from shardrt.testing import RankPool
from tests.ranks.sharded_scenarios import SCENARIOS, Loop, Net, run_scenario
from tests.ranks.twins import batch, largest_difference

TOLERANCE = {
    "clipping": 2e-5,
    "clipped and frozen": 2e-6,
    "offload": 2e-5,
    "accumulation in no_sync": 2e-5,
    "accumulation": 2e-5,
    "several forwards": 2e-5,
}
"""Where sums are formed in another order; all else is the same to the bit on two ranks."""


@pytest.mark.parametrize("strategy", ["shard_grad_op", "full_shard"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(ranks: RankPool, name: str, strategy: str) -> None:
    for value in ranks.run(run_scenario, ranks=2, name=name, strategy=strategy):
        assert value["difference"] <= TOLERANCE.get(name, 0.0), value
        if name in ("clipping", "clipped and frozen"):
            assert value["returned"] < 1e-5
        if name == "evaluation between":
            assert value["returned"] == 0.0
        if name == "GradScaler":
            assert value["returned"] == [2.0**5, 2.0**5]


WHERE_PARAMETERS_STAY = (
    *("plain", "clipping", "clipped and frozen", "accumulation", "never zeroed", "GradScaler", "evaluation between"),
    *("several forwards", "frozen and thawed", "checkpointed", "momentum", "adapters"),
)


@pytest.mark.parametrize("strategy", ["no_shard", "shard_optim"])
@pytest.mark.parametrize("name", WHERE_PARAMETERS_STAY)
def test_scenario_where_parameters_stay(ranks: RankPool, name: str, strategy: str) -> None:
    for value in ranks.run(run_scenario, ranks=2, name=name, strategy=strategy):
        # no_shard averages what was averaged before together with what is new.
        assert value["difference"] <= TOLERANCE.get(name, 1e-6 if name == "never zeroed" else 0.0), value


@pytest.mark.parametrize("schedule", ["bucket", "interleaved", "priority"])
@pytest.mark.parametrize("strategy", ["shard_optim", "full_shard"])
def test_layers_freeze_in_turns(ranks: RankPool, strategy: str, schedule: str) -> None:
    for value in ranks.run(run_scenario, ranks=2, name="frozen in turns", strategy=strategy, schedule=schedule):
        assert value["difference"] == 0.0, value


@pytest.mark.parametrize("schedule", ["bucket", "priority"])
@pytest.mark.parametrize("strategy", ["shard_optim", "full_shard"])
def test_clipping_what_is_left_when_some_is_frozen(ranks: RankPool, strategy: str, schedule: str) -> None:
    for value in ranks.run(run_scenario, ranks=2, name="clipped and frozen", strategy=strategy, schedule=schedule):
        assert value["difference"] <= TOLERANCE["clipped and frozen"], value
        assert value["returned"] < 1e-5


@pytest.mark.parametrize("schedule", ["bucket", "interleaved", "priority"])
@pytest.mark.parametrize("strategy", ["shard_grad_op", "full_shard"])
def test_every_schedule(ranks: RankPool, strategy: str, schedule: str) -> None:
    for value in ranks.run(run_scenario, ranks=2, name="plain", strategy=strategy, schedule=schedule):
        assert value["difference"] == 0.0


@pytest.mark.parametrize("world_size", [1, 4])
def test_other_world_sizes(ranks: RankPool, world_size: int) -> None:
    for value in ranks.run(run_scenario, ranks=world_size, name="plain", strategy="full_shard"):
        assert value["difference"] <= (0.0 if world_size == 1 else 5e-6)


def test_the_reference_backend(ranks: RankPool) -> None:
    for value in ranks.run(run_scenario, ranks=2, name="plain", strategy="full_shard", backend="reference"):
        assert value["difference"] == 0.0


def reads_outside() -> list[str]:
    told = []
    with shardrt.Runtime(timeout=30) as rt:
        model, opt = rt.shard(Net(), torch.optim.SGD, lr=0.1)
        for read in (
            lambda: model.inlet.weight.sum(),
            lambda: model.inlet.weight[0, 0],
            lambda: model.inlet.weight.data,
            lambda: print(model.blocks[0][0].bias),
            lambda: torch.nn.utils.parameters_to_vector(model.parameters()),
        ):
            try:
                read()
                told.append("read")
            except shardrt.errors.StateError as error:
                told.append(str(error))
        shapes = sum(param.numel() for param in model.parameters())
        told.append(str(shapes == sum(param.numel() for param in Net().parameters())))
        with rt.summon_full_params(model), torch.no_grad():
            model.inlet.weight.fill_(0.5)
        model(batch(0, rt.rank)).sum().backward()
        opt.zero_grad()
        with rt.summon_full_params(model):
            told.append(str(model.inlet.weight.unique().tolist()))
        with rt.summon_full_params(model, writeback=False), torch.no_grad():
            model.inlet.weight.fill_(0.25)
        with rt.summon_full_params(model):
            told.append(str(model.inlet.weight.unique().tolist()))
    return told


def test_a_parameter_that_is_away_says_how_to_read_it(ranks: RankPool) -> None:
    for told in ranks.run(reads_outside, ranks=2):
        assert all("summon_full_params" in text for text in told[:5]), told
        assert told[5:] == ["True", "[0.5]", "[0.5]"]


def refusals() -> list[str]:
    told = []
    with shardrt.Runtime(timeout=30) as rt:
        calls: list[dict[str, Any]] = [
            {"strategy": "full_shrad"},
            {"units": -3},
            {"units": [torch.nn.Linear(1, 1)]},
            {"prefetch": "sometimes"},
            {"divide_units": "yes"},
            {"optimizer_class": torch.optim.Muon, "partitioner": "flat"},
        ]
        for call in calls:
            optimizer_class = call.pop("optimizer_class", torch.optim.SGD)
            try:
                rt.shard(Net(), optimizer_class, lr=0.1, **call)
                told.append("done")
            except shardrt.errors.ShardrtError as error:
                told.append(str(error))
        model, opt = rt.shard(Net(), torch.optim.SGD, lr=0.1)
        for attempt in (
            lambda: rt.shard(model, torch.optim.SGD, lr=0.1),
            lambda: rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1),
            lambda: opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}),
        ):
            try:
                attempt()
                told.append("done")
            except shardrt.errors.ShardrtError as error:
                told.append(str(error))
    return told


def test_what_cannot_be_is_refused_with_what_can(ranks: RankPool) -> None:
    for told in ranks.run(refusals, ranks=2):
        for text, words in zip(
            told,
            (
                "did you mean 'full_shard'",
                "number of parameters from 1 up",
                "no part of the module",
                "'pre', 'post', None",
                "divide_units='yes' is not possible; give True or False",
                "greedy",
                "sharded already",
                "step the optimizer that came with it",
                "build the whole module first",
            ),
            strict=True,
        ):
            assert words in text, told


def stale() -> list[float]:
    with shardrt.Runtime(timeout=30) as rt:
        loop = Loop(rt, "full_shard")
        found = []
        for step in range(3):
            loop.twin_backward(step)
            loop.backward(step)
            loop.model(batch(3, rt.rank))  # a forward that nobody takes a gradient of
            loop.step()
            found.append(largest_difference([loop.model(batch(9, 0))], [loop.twin(batch(9, 0))]))
            state = {name: torch.full_like(value, 0.01) for name, value in loop.twin.state_dict().items()}
            if step == 1:
                rt.load_state_dict(loop.model, state)
                loop.twin.load_state_dict(state)
                found.append(largest_difference([loop.model(batch(9, 0))], [loop.twin(batch(9, 0))]))
        return [*found, loop.difference()]


def test_what_was_gathered_before_is_not_used_after_a_step_or_a_load(ranks: RankPool) -> None:
    assert ranks.run(stale, ranks=2) == [[0.0] * 5] * 2


def forward_inside_summon() -> str:
    with shardrt.Runtime(timeout=30) as rt:
        model, _ = rt.shard(Net(), torch.optim.SGD, lr=0.1)
        with rt.summon_full_params(model):
            try:
                model(batch(0, rt.rank))
            except shardrt.errors.StateError as error:
                return str(error)
    return "done"


def test_a_forward_inside_summon_is_refused(ranks: RankPool) -> None:
    assert all("leave the block first" in told for told in ranks.run(forward_inside_summon, ranks=2))

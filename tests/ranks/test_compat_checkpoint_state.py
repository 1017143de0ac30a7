"""The functions that scripts save and load FSDP2 models with, from our package: with files of torch's and of ours."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import ShardingStrategy

from shardrt import compat
from shardrt.errors import ShardrtError
from shardrt.testing import RankPool
from tests.ranks import fsdp_runs
from tests.ranks.fsdp_runs import LAYOUTS

BY_TORCH = 1e-6
"""FSDP2 adds gradients in another order."""
NAMES = ("fully_shard", "get_state_dict", "set_state_dict")


def with_our_import(call: str, arguments: list[str]) -> Any:
    """A script of torch's of which only imports were changed."""
    warnings.simplefilter("ignore")
    theirs = {name: getattr(fsdp_runs, name) for name in NAMES}
    vars(fsdp_runs).update({name: getattr(compat, name) for name in NAMES})
    try:
        return getattr(fsdp_runs, call)(*arguments)
    finally:
        vars(fsdp_runs).update(theirs)


def differences(one: Path, other: Path) -> tuple[float, list[str]]:
    """The largest between tensors of two whole states, and what only one of them has."""
    found = [torch.load(path, weights_only=True) for path in (one, other)]
    flat = [
        {f"model.{name}": value for name, value in state["model"].items()}
        | {f"optim.{n}.{k}": v for n, values in state["optim"]["state"].items() for k, v in values.items()}
        | {f"group.{p}.lr": group["lr"] for group in state["optim"]["param_groups"] for p in group["params"]}
        for state in found
    ]
    both = [name for name in flat[0] if name in flat[1]]
    worst = max(float((torch.as_tensor(flat[0][n]) - torch.as_tensor(flat[1][n])).abs().max()) for n in both)
    return worst, sorted(flat[0].keys() ^ flat[1].keys())


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_scripts_go_on_from_their_own_files_and_from_torchs(ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    theirs, ours = tmp_path / "torch", tmp_path / "ours"
    for directory in (theirs, ours):
        directory.mkdir()
    ranks.run(fsdp_runs.leave_checkpoints, ranks=2, directory=str(theirs), optimizer=optimizer)
    ranks.run(with_our_import, ranks=2, call="leave_checkpoints", arguments=[str(ours), optimizer])
    for moment in ("then", "later"):
        worst, only_one = differences(theirs / f"{moment}.pt", ours / f"{moment}.pt")
        assert (worst <= BY_TORCH, only_one) == (True, []), worst
    for number, layout in enumerate(LAYOUTS):
        for directory in (theirs, ours):
            arguments = [str(directory), layout, layout, optimizer]
            epochs = ranks.run(with_our_import, ranks=(2, 3, 1)[number], call="start_from", arguments=arguments)
            assert set(epochs) == {3}
            assert differences(directory / "then.pt", directory / f"{layout}-then.pt") == (0.0, [])
            assert differences(directory / "later.pt", directory / f"{layout}-later.pt")[0] <= BY_TORCH


def whole_by_the_first_rank(interface: str) -> dict[str, Any]:
    """Rank 0 alone has the whole state, hands it out, and two optimizers share the parameters."""
    model, other = (_sharded(interface, seed) for seed in (1, 2))
    first, second = _two_optimizers(model)
    _train(model, [first, second], range(3))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    of_model, of_optimizers = compat.get_state_dict(model, [first, second], options=options)
    trained = compat.get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    others = _two_optimizers(other)
    compat.set_state_dict(
        other,
        others,
        model_state_dict=of_model,
        optim_state_dict=of_optimizers,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    again, optimizers_again = compat.get_state_dict(other, others)
    expected, optimizers_expected = compat.get_state_dict(model, [first, second])
    equal = all(torch.equal(again[name], expected[name]) for name in expected)
    for name, values in optimizers_expected["state"].items():
        equal &= all(
            torch.equal(value, optimizers_again["state"][name][key])
            for key, value in values.items()
            if isinstance(value, torch.Tensor)
        )
    return {
        "rank": dist.get_rank(),
        "has": (len(of_model), len(of_optimizers)),
        "trained": sorted(trained),
        "equal": equal,
        "stepped": sorted(optimizers_again["state"]),
        "rates": [group["lr"] for group in optimizers_again["param_groups"]],
    }


def _train(model: Any, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _sharded(interface: str, seed: int, strategy: str = "FULL_SHARD") -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    if interface == "fully_shard":
        return compat.fully_shard(model)
    return compat.FullyShardedDataParallel(model, sharding_strategy=ShardingStrategy[strategy])


def _two_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    weights = [param for name, param in named.items() if "weight" in name]
    biases = [param for name, param in named.items() if "bias" in name]
    return [torch.optim.AdamW(weights, lr=0.01), torch.optim.SGD(biases, lr=0.1, momentum=0.9)]


@pytest.mark.parametrize("interface", ["fully_shard", "wrapper"])
def test_the_first_rank_has_it_whole_and_hands_it_out(ranks: RankPool, interface: str) -> None:
    for found in ranks.run(whole_by_the_first_rank, ranks=2, interface=interface):
        assert found["has"] == ([4, 2] if found["rank"] == 0 else [0, 0])
        assert found["trained"] == ["0.weight", "2.bias", "2.weight"]
        assert found["equal"]
        assert found["stepped"] == ["0.weight", "2.bias", "2.weight"]
        assert found["rates"] == [0.01, 0.1]


def gone_back(interface: str, strategy: str) -> float:
    """A model that was trained further takes over what it was before, and trains the same again."""
    model = _sharded(interface, 1, strategy)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.01)
    _train(model, [optimizer], range(2))
    of_model, of_optimizer = compat.get_state_dict(model, optimizer)
    _train(model, [optimizer], range(2, 4))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    compat.set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    _train(model, [optimizer], range(2, 4))
    found = model.state_dict()
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("interface", "strategy"), [("fully_shard", ""), ("wrapper", "FULL_SHARD"), ("wrapper", "NO_SHARD")]
)
def test_a_trained_model_can_go_back(ranks: RankPool, interface: str, strategy: str, world_size: int) -> None:
    for difference in ranks.run(gone_back, ranks=world_size, interface=interface, strategy=strategy):
        assert difference == 0.0


def an_optimizer_that_has_not_stepped() -> list[Any]:
    """Its state dict has a form to load into, and it is as it was."""
    model = _sharded("fully_shard", 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (optimizer, _) = _two_optimizers(model)
    state = compat.get_optimizer_state_dict(model, optimizer)
    after = model.state_dict()
    return [
        sorted(state["state"]["0.weight"]),
        list(state["state"]["0.weight"]["exp_avg"].shape),
        state["param_groups"][0]["lr"],
        len(optimizer.state),
        all(torch.equal(before[name], after[name]) for name in before),
        all(param.grad is None for param in model.parameters()),
    ]


def test_an_optimizer_that_has_not_stepped_can_be_loaded_into(ranks: RankPool) -> None:
    for found in ranks.run(an_optimizer_that_has_not_stepped, ranks=2):
        assert found == [["exp_avg", "exp_avg_sq", "step"], [5, 6], 0.01, 0, True, True]


def refusals() -> list[str]:
    """What would lose something, or cannot be."""
    model = _sharded("fully_shard", 1)
    optimizer, other = _two_optimizers(model)
    _train(model, [optimizer, other], range(1))
    whole = compat.get_optimizer_state_dict(model, optimizer)
    wrong = {**whole["state"]["0.weight"], "exp_avg": torch.zeros(7, 6)}
    attempts = [
        lambda: torchs.get_optimizer_state_dict(model, optimizer),
        lambda: compat.get_model_state_dict(model, submodules={model[0]}),
        lambda: compat.set_model_state_dict(model, {}, options=StateDictOptions(broadcast_from_rank0=True)),
        lambda: compat.set_model_state_dict(model, {"0.weight": torch.zeros(5, 6)}),
        lambda: compat.set_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": []}),
        lambda: compat.set_optimizer_state_dict(model, optimizer, {**whole, "state": {"0.weight": wrong}}),
    ]
    said = []
    for attempt in attempts:
        try:
            attempt()
            said.append("")
        except ShardrtError as error:
            said.append(str(error))
    return said


def test_what_would_lose_something_is_refused(ranks: RankPool) -> None:
    for said in ranks.run(refusals, ranks=2):
        assert "import the function of the same name from shardrt.compat" in said[0]
        assert "take what you need from the whole state" in said[1]
        assert "set full_state_dict=True" in said[2]
        assert "0.bias" in said[3]
        assert "groups" in said[4]
        assert "0.weight" in said[5] and "7" in said[5]


def test_other_modules_are_left_to_torch() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    of_model, of_optimizer = compat.get_state_dict(model, optimizer)
    assert list(of_model) == ["weight", "bias"]
    assert of_optimizer["param_groups"][0]["params"] == ["weight", "bias"]
    compat.set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5

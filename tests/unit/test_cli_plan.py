"""``shardrt plan``: from a function, a class and a file; what each rank owns; what cannot be planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from shardrt.cli import main

HERE = "tests.unit.test_cli_plan"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def planned(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


class Tied(torch.nn.Module):
    """Two names for one matrix, and one parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(100, 10)
        self.head = torch.nn.Linear(10, 100, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = torch.nn.Parameter(torch.ones(7), requires_grad=False)


def huge() -> torch.nn.Module:
    """A model that no machine has memory for."""
    return torch.nn.Linear(2**21, 2**21, bias=False)


def needs_width(width: int) -> torch.nn.Module:
    """A function that cannot be called as it is."""
    return torch.nn.Linear(width, width)


NO_MODEL = [1]


def test_ranks_own_the_whole_between_them() -> None:
    found = planned(f"{HERE}:Tied", "--ranks", "3", "--partitioner", "flat")
    assert found["trained_bytes"] == 4000 == sum(one["bytes"] for one in found["ranks"])
    assert found["parameters"] == 2 and found["world_size"] == 3
    assert found["state_bytes_unsharded"] == 8000 == sum(one["state_bytes"] for one in found["ranks"])
    # Each sends what others own of its gradients, and what it owns to both of them.
    assert [one["sent_bytes"] for one in found["ranks"]] == [4000 + one["bytes"] for one in found["ranks"]]


def test_a_model_is_built_without_memory() -> None:
    found = planned(f"{HERE}:huge", "--ranks", "1024", "--partitioner", "flat")
    assert found["trained_bytes"] == 2**44 and found["imbalance"] == pytest.approx(1.0)


def test_parameters_stay_whole_for_an_optimizer_that_needs_them_so() -> None:
    found = planned(f"{HERE}:huge", "--ranks", "2", "--optimizer", "torch.optim:Adafactor")
    assert sorted(one["bytes"] for one in found["ranks"]) == [0, 2**44]
    result = run(f"{HERE}:huge", "--ranks", "2", "--optimizer", "torch.optim:Adafactor", "--partitioner", "flat")
    assert result.exit_code == 1 and "needs whole parameters" in result.stderr


def test_weights_in_files_are_planned_alike(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = torch.nn.Linear(30, 20)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    for name in ("weights.pt", "model.safetensors"):
        found = planned(str(tmp_path / name), "--ranks", "2", "--bucket-mb", "0.001")
        assert (found["trained_bytes"], found["parameters"]) == (2480, 2)
        assert sum(one["bytes"] for one in found["buckets"]) == 2480


def test_tables_are_for_people() -> None:
    told = run(f"{HERE}:Tied", "--ranks", "3", "--limit", "2").output
    assert "2 parameters, 4.0 kB trained, over 3 ranks by greedy" in told
    assert "... and 1 more; --limit shows them" in told
    assert "Without sharding every rank would hold 8.0 kB of state." in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([f"{HERE}:needs_width"], "give a function that needs no arguments and returns the model"),
        ([f"{HERE}:NO_MODEL"], "'list' object is not callable"),
        ([f"{HERE}:no_such"], "cannot be imported: AttributeError"),
        (["no.such.module:x"], "cannot be imported: ModuleNotFoundError"),
        (["json:dumps"], "failed: TypeError"),
        (["time:time"], "gave a float instead of a torch.nn.Module"),
        (["torch.nn:ReLU"], "has no parameters to plan for"),
        ([f"{HERE}:Tied", "--optimizer", "torch.optim:LBFGS"], "LBFGS computes each update from the whole model"),
        ([f"{HERE}:Tied", "--optimizer", "torch:Tensor"], "no optimizer class"),
        ([f"{HERE}:Tied", "--partitioner", "gready"], "did you mean 'greedy'?"),
        (["no-such-file.pt"], "no-such-file.pt"),
    ],
)
def test_what_cannot_be_planned_is_told(arguments: list[str], told: str) -> None:
    result = run(*arguments, "--ranks", "2")
    assert result.exit_code == 1 and told in result.stderr, result.output

"""What ``rt.shard`` and its kin are given by mistake: an error that says so, and nothing that is silently left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardrt
from shardrt.errors import ConfigError


def layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"ignored_parameters": ["0.weight"]}, r"ignored_parameters= takes parameters themselves, got '0.weight'"),
        ({"ignored_parameters": "0.weight"}, r"ignored_parameters= takes parameters themselves, got '0.weight'"),
        ({"ignored_parameters": [3]}, r"ignored_parameters= takes parameters themselves, got 3; pass .*get_parameter"),
        ({"ignored_modules": ["0"]}, r"ignored_modules= takes modules themselves, got '0'; pass .*get_submodule"),
        ({"ignored_modules": 3}, r"ignored_modules= takes modules themselves, got 3"),
        ({"param_groups": 3}, r"param_groups= must be groups, or a function that makes them; got 3"),
    ],
)
def test_things_of_another_kind_are_refused(given: dict[str, Any], told: str) -> None:
    with shardrt.Runtime() as rt, pytest.raises(ConfigError, match=told):
        rt.shard(layers(), torch.optim.SGD, lr=0.1, **given)


def test_what_is_ignored_stays_also_when_a_generator_gives_it() -> None:
    model = layers()
    before = model[0].weight.detach().clone()
    with shardrt.Runtime() as rt:
        module, optimizer = rt.shard(
            model, torch.optim.SGD, lr=0.1, ignored_modules=(one for one in [model[0]]), mixed_precision=None
        )
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert torch.equal(model[0].weight, before)
        assert model[1].weight in optimizer.param_groups[0]["params"]


def test_a_mesh_of_words_is_refused() -> None:
    from shardrt.optim.mesh import groups_of

    with pytest.raises(ConfigError, match=r"mesh='x' is not possible; give groups of ranks"):
        groups_of("x", world_size=2)


def test_neither_modules_nor_paths(tmp_path: Path) -> None:
    with shardrt.Runtime() as rt:
        with pytest.raises(ConfigError, match=r"summon_full_params takes a torch.nn.Module, got 3"):
            rt.summon_full_params(3).__enter__()  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"a checkpoint needs a path, got None"):
            rt.save(None, extra={})  # type: ignore[arg-type]
        assert not list(tmp_path.iterdir())

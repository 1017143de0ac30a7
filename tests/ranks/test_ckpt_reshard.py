"""Saved by three ranks, resharded by the command to two, loaded by two and by four: the same state everywhere."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import shardrt
from shardrt.cli import main
from shardrt.testing import RankPool
from tests.ranks.twins import Odd, batch


def digest(value: Any) -> str:
    """Of all bits of a state dict, wherever they are in it."""
    found = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            found.update(f"{item.dtype} {tuple(item.shape)}".encode())
            found.update(bytes(item.detach().contiguous().reshape(-1).view(torch.uint8).tolist()))
        elif isinstance(item, dict):
            for key, inner in item.items():
                found.update(repr(key).encode())
                add(inner)
        elif isinstance(item, (list, tuple)):
            for inner in item:
                add(inner)
        else:
            found.update(repr(item).encode())

    add(value)
    return found.hexdigest()


def digests(rt: shardrt.Runtime, model: torch.nn.Module, opt: Any, extra: Any) -> list[str]:
    return [digest(model.state_dict()), digest(rt.full_state_dict(opt)), digest(extra)]


def build(rt: shardrt.Runtime, partitioner_seed: int) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(partitioner_seed)
    model = Odd()
    return model, rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=0.05)


def saved(path: str, partitioner: str) -> list[str]:
    with shardrt.Runtime(partitioner=partitioner) as rt:
        model, opt = build(rt, 1)
        for step in range(3):
            model(batch(step, rt.rank)).sum().backward()
            opt.step()
            opt.zero_grad()
        extra = {"epoch": 2, "order": torch.arange(7)}
        rt.save(path, model=model, optimizer=opt, extra=extra)
        return digests(rt, model, opt, extra)


def loaded(path: str, partitioner: str) -> list[str]:
    with shardrt.Runtime(partitioner=partitioner) as rt:
        model, opt = build(rt, 2)
        extra = rt.load(path, model=model, optimizer=opt)
        return digests(rt, model, opt, extra)


@pytest.mark.parametrize(("before", "offline", "after"), [("flat", "greedy", "flat"), ("greedy", "flat", "greedy")])
def test_a_resharded_checkpoint_is_loaded_by_any_number_of_ranks(
    ranks: RankPool, tmp_path: Path, before: str, offline: str, after: str
) -> None:
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    [expected, *others] = ranks.run(saved, ranks=3, path=run, partitioner=before)
    assert others == [expected] * 2
    arguments = ["ckpt", "reshard", run, out, "--ranks", "2", "--partitioner", offline]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0 and "random states of 3 ranks were left out" in result.stdout
    assert ranks.run(loaded, ranks=2, path=out, partitioner=after) == [expected] * 2
    assert ranks.run(loaded, ranks=4, path=out, partitioner=offline) == [expected] * 4
    assert CliRunner().invoke(main, ["ckpt", "diff", run, out]).exit_code == 0

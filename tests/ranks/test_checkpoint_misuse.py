"""What people do by mistake when they save and load: refused at once, and nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardrt
from shardrt.errors import CheckpointError, ConfigError, HandshakeError, StateError
from shardrt.testing import RankPool
from tests.ranks.keeping import Run


def unshared(path: str) -> str:
    """Each rank has a directory of its own under one name."""
    with shardrt.Runtime(timeout=20, place=lambda root: _own(root)) as rt:
        run = Run(rt)
        run.train(0, 1)
        try:
            run.save(path)
        except CheckpointError as error:
            return str(error)
    return ""


def _own(root: str) -> Any:
    from shardrt.choosing import choose_place

    return choose_place(shardrt.load_registry())(f"{root}/rank{os.environ['RANK']}")


def test_ranks_that_do_not_share_the_directory_are_told_when_they_save(ranks: RankPool, tmp_path: Path) -> None:
    for told in ranks.run(unshared, ranks=2, path=str(tmp_path)):
        assert "rank 1 has written" in told and "do not share this directory" in told
    assert list(tmp_path.rglob("manifest.json")) == []


def different_options(path: str) -> str:
    with shardrt.Runtime(timeout=20) as rt:
        run = Run(rt)
        run.opt.param_groups[0]["lr"] = 0.1 * (rt.rank + 1)
        try:
            run.save(path)
        except HandshakeError as error:
            return str(error)
    return ""


def test_ranks_with_different_options_do_not_save(ranks: RankPool, tmp_path: Path) -> None:
    for told in ranks.run(different_options, ranks=2, path=str(tmp_path)):
        assert "group options" in told and "0.2" in told and "0.1" in told


def inside_join(path: str) -> str:
    with shardrt.Runtime(timeout=20) as rt:
        run = Run(rt)
        try:
            with rt.join(run.opt):
                run.train(0, 1 + rt.rank)
                run.save(path)
        except ConfigError as error:
            return str(error)
        except shardrt.ShardrtError as error:
            return f"told: {error}"
    return ""


def test_saving_inside_join_is_refused_at_once(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(inside_join, ranks=2, path=str(tmp_path))
    assert "inside a block of rt.join" in first and "inside a block of rt.join" in second


def test_a_checkpoint_is_not_saved_into_another(tmp_path: Path) -> None:
    with shardrt.Runtime() as rt:
        model = torch.nn.Linear(2, 2)
        path = rt.save(tmp_path, model=model).path
        with pytest.raises(CheckpointError, match="is itself a checkpoint"):
            rt.save(path, model=model)
        assert rt.load(path, model=model) == rt.load(tmp_path, model=model) == {}


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    with shardrt.Runtime() as rt:
        model = torch.nn.Linear(2, 2)
        rt.save(tmp_path, model=model, optimizer=rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1))
        other = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.5, momentum=0.9)
        with pytest.raises(StateError, match=r"AdamW, and optimizer 'optimizer' is a torch\.optim\.sgd\.SGD"):
            rt.load(tmp_path, optimizer=other)
        assert other.param_groups[0]["lr"] == 0.5
        adamw = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1)
        with pytest.raises(StateError, match="'betas'"):
            adamw.load_state_dict(torch.optim.SGD(model.parameters(), lr=1.0).state_dict())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tensors_that_lie_oddly_in_memory_are_saved(tmp_path: Path, asynchronous: bool) -> None:
    with shardrt.Runtime() as rt:
        model = torch.nn.Linear(2, 2)
        model.register_buffer("gaps", torch.arange(10.0)[::2])
        extra = {
            "gaps": torch.arange(10)[::2],
            "one": torch.ones(1).expand(5),
            "conj": torch.tensor([1 + 2j]).conj(),
            "negative": torch.tensor([1 + 2j]).conj().imag,
        }
        rt.save(tmp_path, model=model, extra=extra, asynchronous=asynchronous).wait()
        with torch.no_grad():
            model.gaps.zero_()
        loaded = rt.load(tmp_path, model=model)
        assert model.gaps.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
        assert all(torch.equal(loaded[name], extra[name]) for name in extra)


SCRIPT = """
import sys, shardrt, torch
def work(rt):
    model = torch.nn.Linear(1500, 1500)
    rt.save(sys.argv[1], model=model, extra={"done": True}, asynchronous=True)
if sys.argv[2] == "exit":
    with shardrt.Runtime(timeout=60) as rt:
        work(rt)
        sys.exit(0)
rt = shardrt.Runtime(timeout=60)
work(rt)
"""


@pytest.mark.parametrize(("how", "count"), [("end", 1), ("end", 2), ("exit", 2)])
def test_a_save_behind_the_training_outlives_the_script(tmp_path: Path, how: str, count: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)] if count > 1 else []
    done = subprocess.run(
        [sys.executable, *start, str(script), str(tmp_path / "run"), how],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with shardrt.Runtime() as rt:
        assert rt.load(tmp_path / "run", model=torch.nn.Linear(1500, 1500)) == {"done": True}

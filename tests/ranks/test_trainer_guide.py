"""The trainer of docs/trainer.md on two ranks, stopped and started again."""

from __future__ import annotations

import functools
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardrt.testing import RankPool
from tests.meta.test_docs import blocks_of
from tests.ranks.elastic_runs import ROOT, launch_environment
from tests.ranks.sharded_twins import EVERY_STRATEGY

GUIDE = ROOT / "docs" / "trainer.md"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The file that the guide shows."""
    [code] = [block.code for block in blocks_of(GUIDE.read_text(encoding="utf-8")) if block.file == "train.py"]
    path = tmp_path / "train.py"
    path.write_text(code, encoding="utf-8")
    return path


def run_script(script: str, arguments: list[str]) -> None:
    """On a worker, with the variables that torchrun sets."""
    with mock.patch.object(sys, "argv", [script, *arguments]):
        runpy.run_path(script, run_name="__main__")


def under_torchrun(script: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", str(script), *arguments]
    environment = launch_environment(os.environ)
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def metrics_of(folder: Path) -> dict[int, dict[str, Any]]:
    """By step; of a step that was done again, the later."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {entry["step"]: entry for entry in map(json.loads, lines)}


def check_resume(start: Callable[..., None], folder: Path, strategy: str) -> None:
    """A run that is stopped and started again is, bit for bit, the run that was not."""
    whole, broken = folder / "whole", folder / "broken"
    start("--folder", str(whole), "--strategy", strategy)
    start("--folder", str(broken), "--strategy", strategy, "--stop-at", "6")  # the last checkpoint is that of step 4
    assert max(metrics_of(broken)) == 6
    start("--folder", str(broken), "--strategy", strategy)
    assert metrics_of(broken) == metrics_of(whole)
    found, expected = (torch.load(each / "model.pt", weights_only=True) for each in (broken, whole))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(list((broken / "checkpoints").glob("save-*"))) == 2
    lines = (broken / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 6 + 8, "it went on from step 4"
    losses = [entry["test loss"] for entry in metrics_of(whole).values() if "test loss" in entry]
    assert len(losses) == 3 and losses[-1] < losses[0]


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_a_resumed_run_has_the_bits_of_one_without_a_break(
    ranks: RankPool, script: Path, tmp_path: Path, strategy: str
) -> None:
    def start(*arguments: str) -> None:
        ranks.run(run_script, ranks=2, init=None, script=str(script), arguments=list(arguments))

    check_resume(start, tmp_path, strategy)


@pytest.mark.long
def test_the_same_under_torchrun(script: Path, tmp_path: Path) -> None:
    check_resume(functools.partial(under_torchrun, script), tmp_path, "full_shard")

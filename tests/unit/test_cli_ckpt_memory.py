"""Commands for checkpoints hold blocks, not tensors: 200 MB of state in a process that may take 48 MB for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardrt

BOUND = 48 * 2**20
"""Less than any one of the four large tensors."""

LIMITED = """
import json, re, resource, sys
from pathlib import Path
import shardrt, torch
from click.testing import CliRunner
from shardrt.cli import main
from shardrt.cli.ckpt import COMMANDS

torch.set_num_threads(1)
runner = CliRunner()
bound, code, *arguments = sys.argv[1:]
for name in COMMANDS:  # imports are not what is measured
    assert runner.invoke(main, ["ckpt", name, "--help"]).exit_code == 0
assert runner.invoke(main, ["ckpt", "diff", arguments[-1], arguments[-1]]).exit_code == 0
arguments = arguments[:-1]
def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
before, peak = status("VmData"), status("VmHWM")
resource.setrlimit(resource.RLIMIT_DATA, (before + int(bound), before + int(bound)))
if arguments[0] == "control":
    try:
        from shardrt.cli.ckpt.opening import open_path
        state = open_path(arguments[1], None, shardrt.load_registry()).portable()
        held = [lazy.whole() for lazy in state.models["model"].values()]
    except (MemoryError, RuntimeError) as error:
        sys.exit(0)
    sys.exit("the limit does not bite")
result = runner.invoke(main, ["ckpt", *arguments, "--json"], catch_exceptions=False)
assert result.exit_code == int(code), result.output
print(json.dumps({"document": json.loads(result.stdout), "peak": status("VmHWM") - peak}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Four tensors of 52 MB: a weight, two of its optimizer's, and one of the trainer's; and a small one to warm up."""
    folder = tmp_path_factory.mktemp("large")
    model = torch.nn.Linear(1, 13_000_000, bias=False)
    with shardrt.Runtime() as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1)
        model.weight.grad = torch.ones_like(model.weight)
        opt.step()
        rt.save(folder / "run", model=model, optimizer=opt, extra={"average": model.weight.detach() * 2})
        rt.save(folder / "small", model=torch.nn.Linear(1, 1))
    return folder / "run", folder / "small"


def limited(small: Path, *arguments: Any, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, str(BOUND), str(code), *map(str, arguments), str(small)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def told(small: Path, *arguments: Any, code: int = 0) -> Any:
    done = limited(small, *arguments, code=code)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["peak"] < BOUND
    return answer["document"]


def test_the_limit_bites(large: tuple[Path, Path]) -> None:
    run, small = large
    done = limited(small, "control", run)
    assert done.returncode == 0, done.stderr


def test_a_block_of_200_mb_is_held_at_a_time(large: tuple[Path, Path], tmp_path: Path) -> None:
    run, small = large
    verified = told(small, "verify", run)
    assert verified["ok"] and verified["checkpoints"][0]["bytes"] > 200e6
    resharded = told(small, "reshard", run, tmp_path / "three", "--ranks", 3, "--partitioner", "flat")["path"]
    assert len(list(Path(resharded).glob("rank-*"))) == 3
    assert told(small, "diff", run, resharded)["same"]
    told(small, "consolidate", resharded, tmp_path / "one")
    assert told(small, "diff", run, tmp_path / "one")["same"]
    told(small, "consolidate", resharded, tmp_path / "w.safetensors", "--format", "safetensors")
    assert (tmp_path / "w.safetensors").stat().st_size > 52e6

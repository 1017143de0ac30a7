"""Commands for checkpoints hold blocks, not tensors: 200 MB of state in a process that may take 48 MB for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
from shardrt.cli.ckpt.opening import open_path

torch.set_num_threads(1)
runner = CliRunner()
bound, small, large, commands = int(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
for name in COMMANDS:  # imports are not what is measured
    assert runner.invoke(main, ["ckpt", name, "--help"]).exit_code == 0
assert runner.invoke(main, ["ckpt", "diff", small, small]).exit_code == 0

def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

before, peak = status("VmData"), status("VmHWM")
resource.setrlimit(resource.RLIMIT_DATA, (before + bound, before + bound))
told = []
for arguments in commands:
    result = runner.invoke(main, ["ckpt", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    told.append(json.loads(result.stdout))
grown = status("VmHWM") - peak
try:  # the limit must bite: a whole tensor does not fit
    open_path(large, None, shardrt.load_registry()).portable().models["model"]["weight"].whole()
    sys.exit("a whole tensor could be held")
except (MemoryError, RuntimeError):
    pass
print(json.dumps({"told": told, "grown": grown}))
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


def test_200_mb_go_through_in_blocks(large: tuple[Path, Path], tmp_path: Path) -> None:
    run, small = map(str, large)
    three, one, weights = (str(tmp_path / name) for name in ("three", "one", "w.safetensors"))
    commands = [
        ["verify", run],
        ["reshard", run, three, "--ranks", "3", "--partitioner", "flat"],
        ["diff", run, three],
        ["consolidate", three, one],
        ["diff", run, one],
        ["consolidate", three, weights, "--format", "safetensors"],
    ]
    command = [sys.executable, "-c", LIMITED, str(BOUND), small, run, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    verified, resharded, same, _, same_again, _ = answer["told"]
    assert verified["ok"] and verified["checkpoints"][0]["bytes"] > 200e6
    assert len(list(Path(resharded["path"]).glob("rank-*"))) == 3
    assert same["same"] and same_again["same"]
    assert Path(weights).stat().st_size > 52e6
    assert answer["grown"] < BOUND

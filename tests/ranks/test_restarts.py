"""Under a launcher that restarts its ranks: the next attempt meets nothing that the one before left in the store."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
import shardrt

attempt, own_group = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), sys.argv[1] == "own group"
if own_group:
    dist.init_process_group("gloo")
rank = int(os.environ["RANK"])

def die_if(who, at):
    if (rank, attempt) == (who, at):
        os.kill(os.getpid(), signal.SIGKILL)

with shardrt.Runtime(timeout=30) as rt:
    die_if(0, 1)  # in the second attempt: before the first optimizer
    model = torch.nn.Linear(4, 4)
    opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
    for step in range(3):
        if step == 1:
            die_if(1, 0)  # in the first attempt: after a step
        model(torch.full((1, 4), float(rank))).sum().backward()
        opt.step()
        opt.zero_grad()
    [total] = {round(value, 4) for value in rt._control.exchange("sum", model.weight.sum().item())}
    print(f"rank {rank} trained to the end in attempt {attempt}", flush=True)
"""


def torchrun(script: Path, *arguments: str, meeting: list[str], variables: dict[str, str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2", *meeting]
    command += ["--monitor-interval", "0.1", str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=420, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


DYNAMIC = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]


@pytest.mark.parametrize(
    "case", ["dynamic", *(pytest.param(case, marks=pytest.mark.long) for case in ("static", "own group"))]
)
def test_a_restarted_run_trains_to_the_end(tmp_path: Path, case: str) -> None:
    """With a group that the runtime starts, and with one of the script's own: torch's Gloo needs a new store then."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())] if case == "static" else DYNAMIC
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if case == "own group" else {}
    printed = torchrun(script, case, meeting=meeting, variables=variables)
    assert sorted(re.findall(r"rank (\d) trained to the end in attempt 2", printed)) == ["0", "1"]
    assert "in attempt 0" not in printed and "in attempt 1" not in printed

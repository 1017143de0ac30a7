"""Checkpoints of one rank for tests of the command ``shardrt ckpt``, and the command itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result

import shardrt
from shardrt.cli import main


class Noted(torch.nn.Linear):
    """A module with something beside its tensors."""

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": 7}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"seen": 7}


class Tied(torch.nn.Module):
    """Tied weights, buffers, a scalar, an empty parameter, two dtypes, a frozen one, and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(60, 40)
        self.norm = torch.nn.BatchNorm1d(40)
        self.body = Noted(40, 40)
        self.head = torch.nn.Linear(40, 60, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.nothing = torch.nn.Parameter(torch.empty(0, 3))
        self.small = torch.nn.Parameter(torch.ones(130, dtype=torch.bfloat16))
        self.frozen = torch.nn.Parameter(torch.randn(11, 7), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.norm(self.embed(tokens))) * self.scale
        return self.head(hidden).sum() + self.small.float().sum() + self.nothing.sum()


def train(rt: shardrt.Runtime, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, steps: int = 2) -> Any:
    """A model and its optimizer after some updates, the same each time."""
    torch.manual_seed(3)
    model = Tied()
    grouped = [
        {"params": [(n, p) for n, p in model.named_parameters() if p.ndim > 1], "lr": 0.01},
        {"params": [(n, p) for n, p in model.named_parameters() if p.ndim <= 1], "lr": 0.02, "weight_decay": 0.0},
    ]
    opt = rt.optimizer(grouped, kind, lr=0.1)
    for _ in range(steps):
        model(torch.randint(60, (9,))).backward()
        opt.step()
        opt.zero_grad()
    return model, opt


def save(path: Path, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, steps: int = 2, **changes: Any) -> Path:
    """A checkpoint of one rank; returns its directory."""
    with shardrt.Runtime() as rt:
        model, opt = train(rt, kind, steps)
        extra = {"epoch": 3, "names": ("a", "b"), "mean": torch.arange(5.0), "big": torch.randn(20_000), 4: {1, 2}}
        saving = rt.save(path, model=model, optimizer=opt, extra={**extra, **changes})
    return Path(saving.path)


def run(*arguments: Any) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(main, ["ckpt", *map(str, arguments)], catch_exceptions=False)


def document(*arguments: Any, code: int = 0) -> Any:
    """What the command says with ``--json``, which must be all that it says."""
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)

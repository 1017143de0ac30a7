"""Runs that save and go on: the same training on any number of ranks, so that one can take over from another."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch

import shardrt
from shardrt.optim.managed import ManagedOptimizer
from tests.ranks.twins import OPTIMIZERS, Odd

GLOBAL_BATCH = 60
"""Divides evenly among 1 to 5 ranks: the average gradient is the same up to rounding."""


class Noisy(torch.nn.Module):
    """An odd model with a buffer that counts, tied weights, and a channels-last convolution."""

    def __init__(self, *, matrices_only: bool = False) -> None:
        super().__init__()
        self.odd = Odd(matrices_only=matrices_only)
        if not matrices_only:
            self.conv = torch.nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        out = self.odd(x)
        if hasattr(self, "conv"):
            out = out + self.conv(x[:, :1, None, None].expand(-1, 1, 3, 3)).mean(dim=(1, 2, 3))[:, None]
        return out


def build(optimizer: str) -> torch.nn.Module:
    torch.manual_seed(7)
    return Noisy(matrices_only=optimizer == "muon")


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [(name, p) for name, p in named if p.dim() > 1], "weight_decay": 0.01},
        {"params": [(name, p) for name, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]


class Run:
    """A model, its optimizer and a scheduler on a runtime."""

    def __init__(self, rt: shardrt.Runtime, optimizer: str = "adamw_foreach") -> None:
        optimizer_class, defaults = OPTIMIZERS[optimizer]
        self.rt = rt
        self.model = build(optimizer)
        parameters = self.model.named_parameters() if optimizer in ("muon", "lion_third_party") else groups(self.model)
        self.opt: ManagedOptimizer = rt.optimizer(parameters, optimizer_class, **defaults)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, T_max=50)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            data = torch.randn(GLOBAL_BATCH, 7, generator=torch.Generator().manual_seed(step))
            mine = data.chunk(self.rt.world_size)[self.rt.rank]
            self.model(mine).pow(2).mean().backward()
            self.opt.step()
            self.opt.zero_grad()
            self.scheduler.step()
        self.rt.finish(self.opt)

    def save(self, path: str, **options: Any) -> Any:
        extra = {"scheduler": self.scheduler.state_dict(), "note": "here"}
        return self.rt.save(path, model=self.model, optimizer=self.opt, extra=extra, **options)

    def load(self, path: str, **options: Any) -> Any:
        extra = self.rt.load(path, model=self.model, optimizer=self.opt, **options)
        if extra is not None:
            self.scheduler.load_state_dict(extra["scheduler"])
        return extra

    def digests(self) -> dict[str, str]:
        """Of every tensor of the consolidated state: equal exactly where the bits are."""
        full = self.rt.full_state_dict(self.opt)
        found = {f"model.{k}": bits(v) for k, v in self.rt.full_state_dict(self.model).items() if k != "seen"}
        for number, values in full["state"].items():
            found |= {f"{number}.{key}": bits(value) for key, value in values.items()}
        options = copy.deepcopy(full["param_groups"])
        return {**found, "options": repr(options), "steps": str(self.opt.steps_taken)}

    def parameters(self) -> list[list[float]]:
        return [param.detach().double().reshape(-1).tolist() for param in self.model.parameters()]


def bits(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def save_run(path: str, steps: int, optimizer: str, runtime: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train and save, then train on without a break: what the resumed run must equal."""
    with shardrt.Runtime(timeout=30, **runtime) as rt:
        run = Run(rt, optimizer)
        run.train(0, steps)
        saving = run.save(path, **options)
        saving.wait()
        saved = run.digests()
        run.train(steps, steps + 20)
        return {"saved": saved, "final": run.digests(), "parameters": run.parameters()}


def load_run(path: str, steps: int, optimizer: str, runtime: dict[str, Any], more: int = 20) -> dict[str, Any]:
    """Load into a run that was made anew, and train on."""
    with shardrt.Runtime(timeout=30, **runtime) as rt:
        run = Run(rt, optimizer)
        run.train(0, 1)  # whatever there was before is replaced
        extra = run.load(path)
        assert extra["note"] == "here"
        loaded = run.digests()
        run.train(steps, steps + more)
        return {"loaded": loaded, "final": run.digests(), "parameters": run.parameters()}


def difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    return max(abs(a - b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True))

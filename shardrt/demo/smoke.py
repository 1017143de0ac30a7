"""The shortest proof that sharded training works here: a few steps, against a twin that needs no communication.

Each rank trains a small model through the runtime, and beside it a copy whose gradients it computes for all ranks
itself, averages and gives to the plain optimizer. If bytes arrive where they should, both have the same bits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardrt.demo.rank import Report, run_rank

if TYPE_CHECKING:
    import torch

_LR = 1e-2


def work(settings: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Train ``settings["steps"]`` steps and compare."""
    import torch

    import shardrt
    from shardrt.demo.training import digest_of, largest_difference

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model, twin = _model(), _model()
    started = time.perf_counter()
    with shardrt.Runtime(device="cpu", timeout=settings.get("timeout", 60.0)) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=_LR)
        plain = torch.optim.AdamW(twin.parameters(), lr=_LR)
        for step in range(settings["steps"]):
            model(_batch(step, rank)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            _average_gradients(twin, step, ranks)
            plain.step()
            plain.zero_grad()
            report({"step": step + 1})
        backend = rt.backend
    difference = largest_difference(model, twin)
    return {
        "ok": difference == 0.0,
        "backend": backend,
        "digest": digest_of(model),
        "largest_parameter_difference": difference,
        "seconds": time.perf_counter() - started,
    }


def _model() -> torch.nn.Module:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 96), torch.nn.Tanh(), torch.nn.Linear(96, 8))


def _batch(step: int, rank: int) -> torch.Tensor:
    import torch

    return torch.randn(4, 32, generator=torch.Generator().manual_seed(1000 * step + rank))


def _average_gradients(twin: torch.nn.Module, step: int, ranks: int) -> None:
    for rank in range(ranks):
        twin(_batch(step, rank)).square().mean().backward()
    for param in twin.parameters():
        assert param.grad is not None
        param.grad /= ranks


if __name__ == "__main__":
    run_rank(work)

"""A real training run on several ranks beside an unsharded twin that must end at the same parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardrt.testing.functions import resolve

if TYPE_CHECKING:
    import torch

_STEPS = 5


def train_beside_twin(kit: str, partitioner: str, bucket_mb: float | None) -> int:
    """Train with the schedule of a conformance class; returns the number of buckets, raises where the twin differs."""
    import torch
    import torch.distributed as dist

    import shardrt

    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, twin = _model(), _model()
    own_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01, weight_decay=0.1)
    schedule: Any = resolve(kit).make()
    with shardrt.Runtime(partitioner=partitioner, schedule=schedule, bucket_mb=bucket_mb, timeout=30) as runtime:
        optimizer = runtime.optimizer(model.named_parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.1)
        for step in range(_STEPS):
            optimizer.zero_grad()
            model(_batch(step, rank)).square().mean().backward()
            optimizer.step()
            own_optimizer.zero_grad()
            for peer in range(world_size):
                (twin(_batch(step, peer)).square().mean() / world_size).backward()
            own_optimizer.step()
            for (name, mine), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(
                    mine.detach(),
                    expected.detach(),
                    rtol=1e-9,
                    atol=1e-12,
                    msg=lambda text, where=f"{name} after step {step + 1}": f"{where}: {text}",  # type: ignore[misc]
                )
        plan = runtime.plan
        assert plan is not None, "the runtime made an optimizer without a plan"
        return len(plan.buckets)


def _model() -> torch.nn.Module:
    import torch

    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 5)
    ).double()


def _batch(step: int, rank: int) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 12, generator=generator, dtype=torch.float64)

"""A sharded module and its unsharded twin, side by side on every rank."""

from __future__ import annotations

from typing import Any

import shardrt
from tests.ranks.twins import OPTIMIZERS, average_backward, batch, largest_difference, twins
from tests.ranks.zoo import ZOO

STRATEGIES = ("shard_optim", "shard_grad_op", "full_shard")


def compare_sharded(
    name: str, strategy: str, optimizer: str = "adamw_foreach", steps: int = 30, **options: Any
) -> dict[str, Any]:
    """Train both twins and tell the largest difference of any parameter."""
    build, units = ZOO[name]
    optimizer_class, defaults = OPTIMIZERS[optimizer]
    runtime = options.pop("runtime", {})
    model, twin = twins(build)
    start = [param.detach().clone() for param in twin.parameters()]
    with shardrt.Runtime(timeout=30, **runtime) as rt:
        model, opt = rt.shard(model, optimizer_class, strategy=strategy, units=units, **options, **defaults)
        plain = optimizer_class([param for param in twin.parameters() if param.requires_grad], **defaults)
        for step in range(steps):
            average_backward(twin, lambda rank: twin(batch(step, rank)).pow(2).mean(), rt.world_size)  # noqa: B023
            plain.step()
            plain.zero_grad()
            model(batch(step, rt.rank)).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
        with rt.summon_full_params(model):
            difference = largest_difference(model.parameters(), twin.parameters())
        return {"difference": difference, "moved": largest_difference(twin.parameters(), start)}

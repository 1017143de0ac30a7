"""A training loop as torch documents it for ``overlap_with_ddp=True``; started by torchrun. Only the imports are ours.

Prints, per hook, the largest difference from DDP with the plain optimizer after each of its iterations.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from shardrt.compat import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved


def build() -> DDP:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(32, 32) for _ in range(6)]
    return DDP(torch.nn.Sequential(*layers), bucket_cap_mb=0.01)


def train(hook: Callable[..., Any], shard_buckets: bool) -> list[float]:
    twin = build()
    plain = torch.optim.Adam(twin.parameters(), lr=0.01)

    ddp = build()
    zero = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.Adam, overlap_with_ddp=True, lr=0.01)
    ddp.register_comm_hook(None, hook(allreduce_hook, ddp, zero, shard_buckets=shard_buckets))

    differences = []
    for step in range(4):
        inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        ddp.zero_grad()
        ddp(inputs).sum().backward()

        twin.zero_grad()
        twin(inputs).sum().backward()
        plain.step()
        pairs = zip(ddp.parameters(), twin.parameters(), strict=True)
        differences.append(max((one - other).abs().max().item() for one, other in pairs))
    return differences


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for hook in (hook_with_zero_step, hook_with_zero_step_interleaved):
        for shard_buckets in (False, True):
            found = train(hook, shard_buckets)
            print(f"{hook.__name__} shard_buckets={shard_buckets} rank {os.environ['RANK']}: {found}", flush=True)
    dist.destroy_process_group()  # before the optimizers and DDP modules are gone
    print("left the group", flush=True)

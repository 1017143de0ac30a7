"""torch's recipe "Shard Optimizer States with ZeroRedundancyOptimizer", with another import.

Otherwise it differs only where it must to run here: on CPUs, with a smaller model, on a port that it is given, and it
spawns one of its two runs, with ZeroRedundancyOptimizer and without, instead of both.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from shardrt.compat import ZeroRedundancyOptimizer

WIDTH = 64


def print_state_size(prefix: str, rank: int, optimizer: torch.optim.Optimizer) -> None:
    """In place of the recipe's peak memory, which CPUs do not count."""
    local = getattr(optimizer, "optim", optimizer)
    elements = sum(state["exp_avg"].numel() for state in local.state.values())
    print(f"{prefix} on rank {rank}: {elements}")


def example(rank: int, world_size: int, use_zero: bool, port: str) -> str:
    torch.manual_seed(0)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = port
    # create default process group
    dist.init_process_group("gloo", rank=rank, world_size=world_size)

    # create local model
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(20)])

    # construct DDP model
    ddp_model = DDP(model)

    # define loss function and optimizer
    loss_fn = nn.MSELoss()
    if use_zero:
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            ddp_model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
        )
    else:
        optimizer = torch.optim.Adam(ddp_model.parameters(), lr=0.01)

    # forward pass
    outputs = ddp_model(torch.randn(20, WIDTH))
    labels = torch.randn(20, WIDTH)
    # backward pass
    loss_fn(outputs, labels).backward()

    # update parameters
    optimizer.step()
    print_state_size("state elements", rank, optimizer)

    params_sum = str(sum(param.double().sum().item() for param in model.parameters()))
    print(f"params sum is: {params_sum}")
    return params_sum


def main(port: str) -> None:
    world_size = 2
    print("=== Using ZeroRedundancyOptimizer ===", flush=True)
    mp.spawn(example, args=(world_size, True, port), nprocs=world_size, join=True)


if __name__ == "__main__":
    main(sys.argv[1])

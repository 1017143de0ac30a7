"""A sharded optimizer in place of DistributedDataParallel's own reduction of gradients.

DDP checks the annotations of a communication hook, and takes them only as objects: no postponed ones in this file.
"""

from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from shardrt.errors import ConfigError
from shardrt.optim.managed import ManagedOptimizer
from shardrt.optim.sharded import ShardedOptimizer


def attach_to_ddp(ddp: object, optimizer: object) -> None:
    """See :meth:`shardrt.Runtime.attach`."""
    if not isinstance(ddp, DistributedDataParallel):
        raise ConfigError(
            f"attach takes a DistributedDataParallel module, got a {type(ddp).__name__}; a plain module needs no attach"
        )
    if not isinstance(optimizer, ManagedOptimizer):
        raise ConfigError(f"attach takes an optimizer made by rt.optimizer, got a {type(optimizer).__name__}")
    trained = optimizer.trained()
    stray = [name for name, param in ddp.named_parameters() if param.requires_grad and param not in trained]
    if stray:
        raise ConfigError(
            f"parameter {stray[0]!r} of the module is not in the optimizer: after attach nobody would reduce its "
            "gradient; give the optimizer all of ddp.named_parameters()"
        )
    if not isinstance(optimizer, ShardedOptimizer):
        return  # one rank: there is nothing to reduce
    if optimizer.gradients == "reduced":
        raise ConfigError(
            "the optimizer was built with gradients='reduced', which leaves the reduction to DDP; build it with "
            "gradients='average' to attach it"
        )
    ddp.register_comm_hook(None, _keep_local_gradients)
    optimizer.leave_gradients_to(ddp)


def _keep_local_gradients(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook: hand the bucket back as it is."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done

"""torch's ``hook_with_zero_step`` and ``hook_with_zero_step_interleaved``, translated onto two schedules.

DDP checks the annotations of a communication hook, and takes them only as objects: no postponed ones in this file.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from shardrt.compat.zero import ZeroRedundancyOptimizer
from shardrt.errors import ConfigError
from shardrt.optim.ddp import bucket_hook
from shardrt.optim.reach import Reach, reach_of

CommunicationHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def hook_with_zero_step(
    hook: CommunicationHook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> CommunicationHook:
    """A communication hook for DDP that reduces as ``hook`` does and steps ``zero`` at the end of every backward.

    Reductions overlap with backward, and the step of each bucket with the reductions still under way: schedule
    ``bucket``. Each bucket goes to one rank whole or, with ``shard_buckets=True``, is split over the ranks. All ranks
    must call this. Parameters are updated from the first backward on.

    Example:
        >>> import os, torch
        >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        >>> from shardrt.compat import ZeroRedundancyOptimizer, hook_with_zero_step
        >>> os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        >>> torch.distributed.init_process_group("gloo")
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> ddp = torch.nn.parallel.DistributedDataParallel(model)
        >>> zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.5)
        >>> ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
        >>> ddp(torch.ones(1, 2)).sum().backward()
        >>> model.weight.tolist()
        [[0.5, 0.5]]
        >>> torch.distributed.destroy_process_group()
    """
    return _stepping_hook("bucket", hook, ddp, zero, shard_buckets)


def hook_with_zero_step_interleaved(
    hook: CommunicationHook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> CommunicationHook:
    """As :func:`hook_with_zero_step`, but each bucket is stepped while backward still runs: schedule ``interleaved``.

    Example:
        >>> import os, torch
        >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        >>> from shardrt.compat import ZeroRedundancyOptimizer, hook_with_zero_step_interleaved
        >>> os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        >>> torch.distributed.init_process_group("gloo")
        >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True)
        >>> ddp.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, ddp, zero))
        >>> ddp(torch.ones(1, 2)).sum().backward()
        >>> zero.state[ddp.module.bias]["step"].item()
        1.0
        >>> torch.distributed.destroy_process_group()
    """
    return _stepping_hook("interleaved", hook, ddp, zero, shard_buckets)


def _stepping_hook(
    schedule: str, hook: CommunicationHook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, split: bool
) -> CommunicationHook:
    _check(hook, ddp, zero)
    made = zero.shard(
        schedule=schedule,
        partitioner=_partitioner(zero, split),
        gradients="average",
        bucket_mb=max(ddp.bucket_bytes_cap, 1) / 2**20,  # DDP takes 0 for a bucket per parameter
    )
    zero.step_inside_backward()
    # The runtime's own reduction gives what allreduce_hook gives, and moves less. Over another group it would not.
    plain = hook is allreduce_hook and ddp.process_group is zero.process_group
    wrapped = _Wrapped(hook)
    with zero.runtime.agreeing(f"hook of schedule {schedule}"):
        reduce = bucket_hook(ddp, [made], zero.runtime, hook=None if plain else wrapped)
    kept = [zero]  # by the hook, and so by DDP: whoever registers it need not keep the optimizer

    def stepping_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert kept
        wrapped.state = state
        return reduce(state, bucket)

    return stepping_hook


class _Wrapped:
    """The user's hook with the state it is registered with, which DDP alone knows and says in each call."""

    def __init__(self, hook: CommunicationHook) -> None:
        self._hook = hook
        self.state: Any = None

    def __call__(self, _: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return self._hook(self.state, bucket)


def _partitioner(zero: ZeroRedundancyOptimizer, split: bool) -> Any:
    """Whole buckets, or split ones; where parameters must not be cut, they are spread singly instead."""
    if split and reach_of(zero.optimizer_class) is not Reach.ELEMENT:
        return "greedy"
    return {"name": "bucket", "split": split}


def _check(hook: object, ddp: object, zero: object) -> None:
    if not isinstance(zero, ZeroRedundancyOptimizer):
        raise ConfigError(
            f"the hook takes a shardrt.compat.ZeroRedundancyOptimizer, got a {type(zero).__module__}."
            f"{type(zero).__qualname__}; change its import too"
        )
    if not zero.overlap_with_ddp:
        raise ConfigError(
            "the hook steps inside backward, but the ZeroRedundancyOptimizer was built without it; build it with "
            "overlap_with_ddp=True"
        )
    if not isinstance(ddp, DistributedDataParallel):
        raise ConfigError(f"the hook takes a DistributedDataParallel module, got a {type(ddp).__name__}")
    if not callable(hook):
        raise ConfigError(f"the hook to wrap must be callable as hook(state, bucket), got {hook!r}")

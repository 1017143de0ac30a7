"""A sharded optimizer in place of DistributedDataParallel's own reduction of gradients.

DDP checks the annotations of a communication hook, and takes them only as objects: no postponed ones in this file.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from shardrt.errors import ConfigError
from shardrt.optim.backward import call_after_backward
from shardrt.optim.hooked import HookResults, OrderedHook, Patience
from shardrt.optim.managed import ManagedOptimizer
from shardrt.optim.sharded import ShardedOptimizer

CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def bucket_hook(
    ddp: object,
    optimizers: Sequence[object],
    patience: Patience,
    *,
    hook: CommHook | None = None,
    state: Any = None,
) -> CommHook:
    """The communication hook that hands a DDP module's gradients to its optimizers.

    They reduce them themselves, or take what ``hook(state, bucket)`` makes of them. See
    :meth:`shardrt.Runtime.attach`, which registers it.
    """
    module, ours = _checked(ddp, optimizers)
    sharded = [optimizer for optimizer in ours if isinstance(optimizer, ShardedOptimizer)]
    if hook is None:
        for optimizer in sharded:
            optimizer.leave_gradients_to(module)
        return _handing_over(ours, None)
    if not callable(hook):
        raise ConfigError(f"hook must be a DDP communication hook, hook(state, bucket), got {hook!r}")
    results = [HookResults(patience) for _ in sharded]
    for optimizer, result in zip(sharded, results, strict=True):
        optimizer.leave_gradients_to(module, result)
    return _handing_over(ours, OrderedHook(hook, state, results=results, patience=patience))


def _handing_over(optimizers: Sequence[ManagedOptimizer], hook: OrderedHook | None) -> CommHook:
    """DDP's communication hook: reduce by the user's hook, or hand the bucket back as it is."""

    def shardrt_hook(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last():
            _announce_backward(optimizers)
            if hook is not None:
                call_after_backward(hook.raise_failure)
            for optimizer in optimizers:
                watch = optimizer.watch if isinstance(optimizer, ShardedOptimizer) else None
                if watch is not None:
                    watch.seen()
                elif optimizer.step_after_backward:  # those that listen to backward themselves step at its end
                    call_after_backward(_twice(optimizer.step))
        if hook is not None:
            return hook(bucket)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    return shardrt_hook


def _announce_backward(optimizers: Sequence[ManagedOptimizer]) -> None:
    """Where DDP synchronises and no round of ours begins, ranks without inputs have to be told."""
    for optimizer in optimizers:
        if isinstance(optimizer, ShardedOptimizer) and optimizer.announcer is not None:
            if optimizer.watch is None or optimizer.watch.paused:
                optimizer.announcer.announce("backward", optimizer)
            return


def _twice(call: Callable[[], Any]) -> Callable[[], None]:
    """Called after backward, asks to be called again: by then DDP has put the reduced gradients in place."""
    return lambda: call_after_backward(lambda: call() and None)


def _checked(ddp: object, optimizers: Sequence[object]) -> tuple[DistributedDataParallel, list[ManagedOptimizer]]:
    if not isinstance(ddp, DistributedDataParallel):
        raise ConfigError(
            f"attach takes a DistributedDataParallel module, got a {type(ddp).__name__}; a plain module needs no attach"
        )
    ours: list[ManagedOptimizer] = []
    for optimizer in optimizers:
        if not isinstance(optimizer, ManagedOptimizer):
            raise ConfigError(f"attach takes optimizers made by rt.optimizer, got a {type(optimizer).__name__}")
        if isinstance(optimizer, ShardedOptimizer) and optimizer.gradients == "reduced":
            raise ConfigError(
                "the optimizer was built with gradients='reduced', which leaves the reduction to DDP; build it with "
                "gradients='average' to attach it"
            )
        ours.append(optimizer)
    if not ours:
        raise ConfigError("attach takes at least one optimizer, got none; rt.attach(ddp, opt)")
    trained: set[torch.Tensor] = set().union(*(optimizer.trained() for optimizer in ours))
    module = {param for param in ddp.parameters() if param.requires_grad}
    stray = [name for name, param in ddp.named_parameters() if param.requires_grad and param not in trained]
    if stray:
        raise ConfigError(
            f"parameter {stray[0]!r} of the module is in none of the optimizers: after attach nobody would reduce its "
            "gradient; give an optimizer all of ddp.named_parameters(), or attach all of them: rt.attach(ddp, a, b)"
        )
    if any(param.requires_grad and param not in module for param in trained):
        raise ConfigError(
            "an optimizer has parameters that are not in the DDP module, so it cannot tell when backward has ended "
            "for it; give those an optimizer of their own"
        )
    return ddp, ours

"""Where parameters stay whole and nothing comes or goes, backward is noticed all the same."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from shardrt.optim.sharded import ShardedOptimizer
from shardrt.sharding.tensors import differentiable, when_gradients_come
from shardrt.sharding.uncompiled import uncompiled


def notice_backward(module: torch.nn.Module, optimizer: ShardedOptimizer) -> None:
    """Where parameters stay: let the optimizer notice a backward before any that may be inside it."""
    watching = weakref.ref(optimizer)

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del module, args
        outputs = differentiable(output) if torch.is_grad_enabled() else []
        if outputs:
            when_gradients_come(outputs, noticed, mode="any")

    def noticed(_: torch.Tensor) -> None:
        alive = watching()
        if alive is not None and alive.watch is not None:
            alive.watch.notice()

    module.register_forward_hook(uncompiled(hook))

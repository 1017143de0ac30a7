"""What a training loop calls on a runtime between building an optimizer and stepping it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from shardrt.handshake import Field
from shardrt.optim.clip import clip_by_norm, covering
from shardrt.optim.ddp import attach_to_ddp
from shardrt.optim.managed import ManagedOptimizer
from shardrt.optim.sharded import ShardedOptimizer
from shardrt.protocols import Communicator


class LoopCalls:
    """The part of :class:`shardrt.Runtime` that works on optimizers it has made."""

    device_type: str
    _optimizers: list[weakref.ref[ManagedOptimizer]]

    def negotiate(self, dtypes: Iterable[str]) -> Communicator:
        """See :meth:`shardrt.Runtime.negotiate`."""
        raise NotImplementedError

    def agreeing(self, topic: str) -> AbstractContextManager[dict[str, Field]]:
        """See :meth:`shardrt.Runtime.agreeing`."""
        raise NotImplementedError

    def _check_open(self) -> None:
        raise NotImplementedError

    def clip_grad_norm_(
        self,
        target: torch.nn.Module | torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Clip by the norm of the whole model's reduced gradient, between backward and step; returns that norm.

        ``target`` is a module or an optimizer of this runtime. Every rank must call it. The scaled gradients are the
        ones the next ``step`` takes.

        Example:
            >>> import shardrt, torch
            >>> model = torch.nn.Linear(4, 4)
            >>> rt = shardrt.Runtime()
            >>> opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
            >>> model(torch.ones(1, 4)).sum().backward()
            >>> bool(rt.clip_grad_norm_(model, max_norm=1.0) > 1.0)
            True
        """
        self._check_open()
        return clip_by_norm(
            target,
            self._living_optimizers(),
            self.negotiate(()),
            device_type=self.device_type,
            max_norm=max_norm,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    def attach(self, ddp: torch.nn.parallel.DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer reduce the gradients of a DistributedDataParallel module in its place.

        DDP stops communicating gradients; the schedule reduces them, during backward if it overlaps. What else DDP
        does (buffers, ``no_sync``, unused parameters) stays. Every rank must call it, once, before training.

        Example:
            >>> import os, shardrt, torch
            >>> os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
            >>> torch.distributed.init_process_group("gloo")
            >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
            >>> with shardrt.Runtime(schedule="bucket") as rt:
            ...     rt.attach(ddp, rt.optimizer(ddp.named_parameters(), torch.optim.SGD, lr=0.1))
            >>> torch.distributed.destroy_process_group()
        """
        self._check_open()
        with self.agreeing("attach"):
            attach_to_ddp(ddp, optimizer)

    @contextmanager
    def no_sync(self, target: torch.nn.Module | torch.optim.Optimizer) -> Iterator[None]:
        """Backward inside this block only accumulates: for all but the last of several before a step.

        ``target`` is an optimizer of this runtime or a module that such optimizers train.

        Example:
            >>> import shardrt, torch
            >>> model = torch.nn.Linear(4, 4)
            >>> rt = shardrt.Runtime(schedule="interleaved")
            >>> opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
            >>> with rt.no_sync(opt):
            ...     model(torch.ones(1, 4)).sum().backward()
            >>> model(torch.ones(1, 4)).sum().backward()
            >>> opt.step()
        """
        watches = [made.watch for made in self._optimizers_of(target) if isinstance(made, ShardedOptimizer)]
        paused = [watch for watch in watches if watch is not None and not watch.paused]
        for watch in paused:
            watch.paused = True
        try:
            yield
        finally:
            for watch in paused:
                watch.paused = False

    def _living_optimizers(self) -> list[ManagedOptimizer]:
        return [made for made in (reference() for reference in self._optimizers) if made is not None]

    def _optimizers_of(self, target: torch.nn.Module | torch.optim.Optimizer) -> list[ManagedOptimizer]:
        return [optimizer for optimizer, _ in covering(target, self._living_optimizers())]

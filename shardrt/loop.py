"""What a training loop calls on a runtime between building an optimizer and stepping it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from shardrt.errors import ConfigError
from shardrt.handshake import Field
from shardrt.joining.block import JoinBlock
from shardrt.joining.opening import open_block
from shardrt.optim.clip import clip_by_norm, clip_by_value, covering
from shardrt.optim.ddp import CommHook, bucket_hook
from shardrt.optim.managed import ManagedOptimizer
from shardrt.optim.sharded import ShardedOptimizer
from shardrt.optim.uses import check_uses
from shardrt.protocols import Communicator
from shardrt.registry import Registry

_ATTACHED = "_shardrt_attached"


class LoopCalls:
    """The part of :class:`shardrt.Runtime` that works on optimizers it has made."""

    rank: int
    world_size: int
    timeout: float
    device_type: str
    registry: Registry
    _optimizers: list[weakref.ref[ManagedOptimizer]]
    _joining: JoinBlock | None = None
    _roll_calls: Communicator | None = None

    def negotiate(self, dtypes: Iterable[str]) -> Communicator:
        """See :meth:`shardrt.Runtime.negotiate`."""
        raise NotImplementedError

    def open_communicator(self, dtypes: Iterable[str]) -> Communicator | None:
        """See :meth:`shardrt.Runtime.open_communicator`."""
        raise NotImplementedError

    def telling_peers(self) -> AbstractContextManager[None]:
        """See :meth:`shardrt.Runtime.telling_peers`."""
        raise NotImplementedError

    def agreeing(self, topic: str) -> AbstractContextManager[dict[str, Field]]:
        """See :meth:`shardrt.Runtime.agreeing`."""
        raise NotImplementedError

    def raise_if_peer_failed(self) -> None:
        """See :meth:`shardrt.Runtime.raise_if_peer_failed`."""
        raise NotImplementedError

    def report_failure(self, error: BaseException) -> None:
        """See :meth:`shardrt.Runtime.report_failure`."""
        raise NotImplementedError

    @property
    def schedule(self) -> Any:
        """See :attr:`shardrt.Runtime.schedule`."""
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
        covered = covering(target, self.living_optimizers())
        numbers: dict[str, Any] = {
            "max_norm": max_norm,
            "norm_type": norm_type,
            "error_if_nonfinite": error_if_nonfinite,
        }
        if self._joining is not None:
            self._joining.announce_clipping("clip_norm", covered, **numbers)
        return clip_by_norm(covered, self.negotiate(()), device_type=self.device_type, **numbers)

    def clip_grad_value_(self, target: torch.nn.Module | torch.optim.Optimizer, clip_value: float) -> None:
        """Clamp every element of the reduced gradient to ``[-clip_value, clip_value]``, between backward and step.

        ``target`` is a module or an optimizer of this runtime. Every rank must call it.

        Example:
            >>> import shardrt, torch
            >>> model = torch.nn.Linear(4, 4)
            >>> rt = shardrt.Runtime()
            >>> opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
            >>> model(torch.ones(1, 4)).sum().backward()
            >>> rt.clip_grad_value_(model, 0.5)
            >>> model.bias.grad
            tensor([0.5000, 0.5000, 0.5000, 0.5000])
        """
        self._check_open()
        covered = covering(target, self.living_optimizers())
        if self._joining is not None:
            self._joining.announce_clipping("clip_value", covered, clip_value=clip_value)
        clip_by_value(covered, self.negotiate(()), device_type=self.device_type, clip_value=clip_value)

    def attach(
        self,
        ddp: torch.nn.parallel.DistributedDataParallel,
        *optimizers: torch.optim.Optimizer,
        hook: CommHook | None = None,
        state: Any = None,
        uses: Sequence[str] = (),
    ) -> None:
        """Let optimizers of this runtime take the gradients of a DistributedDataParallel module.

        DDP stops communicating gradients; the schedule reduces them, during backward if it overlaps. With a ``hook``
        (a communication hook as ``ddp.register_comm_hook(state, hook)`` takes it: fp16 or bf16 compression, PowerSGD,
        your own) that hook reduces them instead. What else DDP does (buffers, ``no_sync``, unused parameters) stays.
        ``uses`` is that of :meth:`shardrt.Runtime.optimizer`. Every rank must call it, once, before training.

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
        with self.agreeing("attach") as fields:
            name = None if hook is None else getattr(hook, "__qualname__", type(hook).__qualname__)
            fields["hook"] = Field(value=name, fix="attach with the same hook on every rank")
            check_uses(self.schedule, uses, self.world_size)
            if hook is None and state is not None:
                raise ConfigError(f"attach got state={state!r} and no hook to use it; pass hook=... too")
            if getattr(ddp, _ATTACHED, False):
                raise ConfigError(
                    "this module is attached already; attach all its optimizers in one call: rt.attach(ddp, a, b)"
                )
            made = bucket_hook(ddp, optimizers, self, hook=hook, state=state)
            ddp.register_comm_hook(None, made)
            setattr(ddp, _ATTACHED, True)

    def finish(self, target: torch.nn.Module | torch.optim.Optimizer) -> None:
        """Wait until the parameters have their new values everywhere.

        Needed only where parameters are read behind Python's back, after a step of a schedule that leaves gathers to
        the next forward (``priority``): through a view or an array made earlier, by code in another language, or by
        handing the parameters themselves to a transform of ``torch.func``.

        Example:
            >>> import shardrt, torch
            >>> model = torch.nn.Linear(4, 4)
            >>> rt = shardrt.Runtime(schedule="priority")
            >>> opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
            >>> opt.step()
            >>> rt.finish(opt)
        """
        for optimizer in self.optimizers_of(target):
            optimizer.finish()

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
        watches = [made.watch for made in self.optimizers_of(target) if isinstance(made, ShardedOptimizer)]
        paused = [watch for watch in watches if watch is not None and not watch.paused]
        for watch in paused:
            watch.paused = True
        try:
            yield
        finally:
            for watch in paused:
                watch.paused = False

    def join(
        self,
        *targets: torch.nn.Module | torch.optim.Optimizer,
        policy: Any = "active",
        carry: Sequence[Any] = (),
    ) -> AbstractContextManager[None]:
        """A block in which ranks train together though they have different numbers of batches.

        ``targets`` are the optimizers of this runtime that the loop steps, or modules that they train; with attached
        DistributedDataParallel modules either will do. A rank whose loop has ended takes part in the others' updates
        at the end of the block, until nobody has batches left. ``policy`` is a name, a mapping of a name and options,
        or an instance: ``"active"`` averages gradients over the ranks that still have batches, ``"all"`` over all
        ranks, ``"shortest"`` ends the block for all once one has run out. ``carry`` are objects with ``state_dict`` and
        ``load_state_dict``, such as schedulers that step per batch, whose state all take from a rank that trained
        longest. An exception on one rank ends the others with an error that names it. Every rank must enter the block.

        Example:
            >>> import shardrt, torch
            >>> model = torch.nn.Linear(4, 4)
            >>> rt = shardrt.Runtime()
            >>> opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
            >>> with rt.join(opt):
            ...     for batch in torch.ones(3 + rt.rank, 1, 4):
            ...         model(batch).sum().backward()
            ...         opt.step()
            ...         opt.zero_grad()
        """
        self._check_open()
        return open_block(self, targets, policy=policy, carry=carry)

    def entered_join(self, block: JoinBlock) -> None:
        """Ranks may have uneven inputs from now on."""
        self._joining = block

    def left_join(self) -> None:
        """The block of uneven inputs has ended."""
        self._joining = None

    def roll_call_communicator(self) -> Communicator:
        """What roll calls go over: beside the optimizers' operations, where the backend can do two things at once."""
        if self._roll_calls is None:
            self._roll_calls = self.open_communicator(()) or self.negotiate(())
        return self._roll_calls

    def has_optimizers(self) -> bool:
        """Whether an optimizer of this runtime is in use."""
        return bool(self.living_optimizers())

    def living_optimizers(self) -> list[ManagedOptimizer]:
        """Those of this runtime that are in use, the oldest first."""
        return [made for made in (reference() for reference in self._optimizers) if made is not None]

    def optimizers_of(self, target: torch.nn.Module | torch.optim.Optimizer) -> list[ManagedOptimizer]:
        """An optimizer of this runtime itself, or those that train a module."""
        return [optimizer for optimizer, _ in covering(target, self.living_optimizers())]

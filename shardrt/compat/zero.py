"""torch's ZeroRedundancyOptimizer, translated onto the runtime."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from shardrt.compat.errors import NotConsolidatedError, OverlapError, ParametersError
from shardrt.compat.groups import find_place, timeout_of
from shardrt.compat.uneven import UnevenSteps
from shardrt.errors import ConfigError, UnsupportedError
from shardrt.log import rank_logger
from shardrt.optim.engine import Gradients
from shardrt.optim.local import LocalOptimizer, step_without_global_hooks
from shardrt.optim.managed import ManagedOptimizer
from shardrt.optim.params import NamedGroup, NamedParam, read_groups
from shardrt.optim.sharded import ShardedOptimizer
from shardrt.runtime import Runtime


class ZeroRedundancyOptimizer(torch.optim.Optimizer, Joinable):
    """Takes what ``torch.distributed.optim.ZeroRedundancyOptimizer`` takes, and does what that documents.

    Each rank keeps the state of its own parameters. Gradients are DDP's business, as there: ``step`` takes ``p.grad``
    as it is, after checking once that ranks hold the same. With ``overlap_with_ddp=True`` the step runs inside DDP's
    backward, through a hook from :func:`hook_with_zero_step` or :func:`hook_with_zero_step_interleaved`.
    ``parameters_as_bucket_view`` is accepted and makes no difference: parameters always are views of buckets.

    Example:
        >>> import torch
        >>> from shardrt.compat import ZeroRedundancyOptimizer
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> opt.step()
        >>> scheduler.step()
        >>> opt.param_groups[0]["lr"], opt.optim.param_groups[0]["lr"]
        (0.005, 0.005)
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        process_group: Any | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        groups = _read(params)
        _check_class(optimizer_class)
        self._sharded: ManagedOptimizer | None = None
        self._consolidated: dict[str, Any] | None = None
        self._uneven: UnevenSteps | None = None
        self._being_set_up = True
        self.optimizer_class = optimizer_class
        self._given_defaults = defaults
        self._given_group = process_group
        self._named: list[NamedParam] = [param for group in groups for param in group.params]
        self.overlap_with_ddp = overlap_with_ddp
        self._step_was_called = False
        self._opt_called = False
        # Asks torch.amp.GradScaler to leave its findings here, by which step() knows that it is being driven by one.
        # Without overlap the scaler works as with any optimizer: gradients are whole and the same on all ranks.
        self._step_supports_amp_scaling = overlap_with_ddp
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._describe_group()
        if overlap_with_ddp:
            # Nothing can be sharded yet, but schedulers will look for all options of the class.
            defaults = LocalOptimizer(
                optimizer_class, [(group.options, []) for group in groups], defaults
            ).inner.defaults
        torch.optim.Optimizer.__init__(self, [group.as_torch() for group in groups], dict(defaults))
        Joinable.__init__(self)
        self._being_set_up = False
        if not overlap_with_ddp:
            self.shard(schedule="sync", partitioner="greedy", gradients="reduced")

    def shard(
        self,
        *,
        schedule: str,
        partitioner: Any,
        gradients: Gradients,
        bucket_mb: float | None = None,
    ) -> ManagedOptimizer:
        """Build the sharded optimizer; with overlap the hooks call it, once. The groups handed out stay the live ones.

        All ranks of the process group must call it.
        """
        if self._sharded is not None:
            raise OverlapError(
                "this ZeroRedundancyOptimizer has been given to hook_with_zero_step before; build another one for "
                "another DistributedDataParallel module"
            )
        timeout = timeout_of(self.process_group, self.join_device)
        limits: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        runtime = Runtime(
            partitioner=partitioner,
            schedule=schedule,
            process_group=self._given_group,
            device=self.join_device.type,
            bucket_mb=bucket_mb,
            **limits,
        )
        try:
            groups = [dict(group) for group in self.param_groups]
            made = runtime.optimizer(groups, self.optimizer_class, gradients=gradients, **self._given_defaults)
        except BaseException:
            runtime.close()
            raise
        self.runtime = runtime
        # Not when the interpreter ends: threads then leave by themselves, without waiting for anybody.
        weakref.finalize(self, _close, runtime).atexit = False
        for own, built in zip(self.param_groups, made.param_groups, strict=True):
            own.update(built)
        made.param_groups[:] = self.param_groups
        self._sharded = made
        self._sharded_step = step_without_global_hooks(made)
        self._describe_group()
        self._share(made)
        return made

    def step_inside_backward(self) -> None:
        """From now on backward steps; whatever waits for a step of this optimizer hears of it."""
        made, myself = self.sharded, weakref.ref(self)

        def before(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            zero = myself()
            for hook in () if zero is None else tuple(zero._optimizer_step_pre_hooks.values()):
                hook(zero, args, kwargs)

        def after(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            zero = myself()
            if zero is None:
                return
            zero._opt_called = True  # what schedulers look at, to warn those who step them first
            for hook in tuple(zero._optimizer_step_post_hooks.values()):
                hook(zero, args, kwargs)

        made.register_step_pre_hook(before)
        made.register_step_post_hook(after)
        made.step_after_backward = True

    @property
    def sharded(self) -> ManagedOptimizer:
        """The runtime's own optimizer underneath: its plan, the bytes of its state."""
        if self._sharded is None:
            raise OverlapError(
                "a ZeroRedundancyOptimizer with overlap_with_ddp=True is complete only once hook_with_zero_step or "
                "hook_with_zero_step_interleaved has been called with it"
            )
        return self._sharded

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's shards, of the class that was asked for."""
        return self.sharded._local_optimizer()

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's parameters and spread them; with overlap, backward has done so and this does nothing."""
        if kwargs:
            raise UnsupportedError(
                f"step() got {', '.join(map(repr, kwargs))}: arguments for the local optimizer's step cannot be passed "
                "on; make them options of the parameter groups, or bind them in a subclass of the optimizer"
            )
        if not self.overlap_with_ddp:
            Join.notify_join_context(self)
            if self._uneven is not None:
                self._uneven.before_step()
            return self._sharded_step(closure)
        if hasattr(self, "found_inf"):
            raise UnsupportedError(
                "torch.amp.GradScaler cannot drive an optimizer with overlap_with_ddp=True, which has stepped with the "
                "scaled gradients during backward; use overlap_with_ddp=False, or train in bfloat16, without a scaler"
            )
        if not self._step_was_called:
            self._step_was_called = True
            reason = "overlap_with_ddp=True: the step runs inside backward"
            rank_logger(self.rank, self.world_size).warning("step.ignored", reason=reason)
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        if self._sharded is None:
            super().zero_grad(set_to_none=set_to_none)
        else:
            self._sharded.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take more parameters to train; every rank must call it. Not possible once a DDP hook has been made."""
        if self._being_set_up:
            super().add_param_group(param_group)
            return
        if self.overlap_with_ddp and self._sharded is not None:
            raise OverlapError(
                "a parameter group cannot be added once hook_with_zero_step has been called: DDP reduces only what was "
                "trained when it was built; wrap the module again and make a new optimizer and hook"
            )
        [group] = _read([param_group], first_group=len(self.param_groups), taken=self._named)
        if self._sharded is None:
            super().add_param_group(group.as_torch())
        else:
            self._sharded.add_param_group(group.as_torch())
        self._named.extend(group.params)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the whole state to the CPU of one rank of the group, where :meth:`state_dict` then has it.

        Every rank calls it. No other rank ever holds more than its own share and a window of some megabytes.
        """
        sharded = self.sharded
        state = self.runtime.gather_state(sharded, to=to, offload_to_cpu=True)
        self._consolidated = state if self.rank == to else None

    def state_dict(self) -> dict[str, Any]:
        """The whole state as it was consolidated last, in the format of the optimizer class; on that rank alone."""
        sharded = self.sharded
        if self.world_size == 1:
            return sharded.state_dict()
        if self._consolidated is None:
            raise NotConsolidatedError(
                f"the optimizer state has not been consolidated on rank {self.rank}; call "
                f"consolidate_state_dict(to={self.rank}) on all ranks first"
            )
        return self._consolidated

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a whole state, which every rank hands over and which is left as it is."""
        self.sharded.load_state_dict(state_dict)

    def join_hook(self, **_kwargs: Any) -> JoinHook:
        """For torch's ``Join([ddp, zero])``: a rank that has run out of inputs takes part in the others' steps.

        Keyword arguments are meant for DDP's own hook, and change nothing here. See :mod:`shardrt.compat.uneven`.
        """
        if self.overlap_with_ddp:
            raise OverlapError(
                "a ZeroRedundancyOptimizer with overlap_with_ddp=True cannot be in torch's Join context, since its "
                "steps run inside DDP's backward; use overlap_with_ddp=False, or rt.attach(ddp, opt) and rt.join(opt)"
            )
        if not isinstance(self.sharded, ShardedOptimizer):
            return JoinHook()  # there is one rank, and nobody to wait for

        def ended() -> None:
            self._uneven = None

        self._uneven = UnevenSteps(self.sharded, self.runtime, step=lambda: self._sharded_step(None), ended=ended)
        return self._uneven

    @property
    def join_device(self) -> torch.device:
        """Where the parameters are."""
        return self._named[0].tensor.device

    @property
    def join_process_group(self) -> Any:
        """The process group."""
        return self.process_group

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: a copy would share this rank's buffers, or leave out what the other ranks hold."""
        raise UnsupportedError(
            "a ZeroRedundancyOptimizer cannot be copied or pickled: it is one rank's part of a whole; build another one"
        )

    def _describe_group(self) -> None:
        place = find_place(self._given_group)
        self.process_group: Any = place.group
        self.rank = place.rank
        self.world_size = place.world_size
        self.global_rank = place.global_rank

    def _share(self, made: ManagedOptimizer) -> None:
        """Groups and state are the same objects here and there, so there is nothing to keep in step."""
        self.param_groups = made.param_groups
        self.state = made.state
        self.defaults = made.defaults


def _read(params: Any, **options: Any) -> list[NamedGroup]:
    try:
        return read_groups(params, **options)
    except ConfigError as error:
        raise ParametersError(str(error)) from None


def _check_class(optimizer_class: object) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise ConfigError(
            f"optimizer_class must be a torch.optim.Optimizer class, got {optimizer_class!r}; functional optimizers "
            "are not needed, with overlap or without: pass the ordinary class"
        )


def _close(runtime: Runtime) -> None:
    """Give the runtime's threads back. The process group is its user's, and may be gone by now."""
    if threading.current_thread() is threading.main_thread():
        runtime.close()
    else:  # garbage is collected on any thread, perhaps on one that closing has to wait for
        threading.Thread(target=runtime.close, name="shardrt-closing", daemon=True).start()

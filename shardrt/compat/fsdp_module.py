"""What modules that were passed to ``fully_shard`` can do besides: torch's ``FSDPModule``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardrt.compat.passed_modules import PASSED, Passed, passed_in
from shardrt.compat.sharded_tree import ShardedTree
from shardrt.errors import ConfigError, UnsupportedError
from shardrt.sharding.prefetching import Direction
from shardrt.state.fitting import incompatible_keys
from shardrt.state.kinds import StateKind


class UnshardHandle:
    """What :meth:`FSDPModule.unshard` returns when it is not to wait.

    Example:
        >>> import torch
        >>> from shardrt.compat import UnshardHandle, fully_shard
        >>> handle = fully_shard(torch.nn.Linear(2, 2)).unshard(async_op=True)
        >>> isinstance(handle, UnshardHandle)
        True
        >>> handle.wait()
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


class FSDPModule(torch.nn.Module):
    """What modules that were passed to :func:`fully_shard` can do besides.

    Example:
        >>> import torch
        >>> from shardrt.compat import FSDPModule, fully_shard
        >>> model = fully_shard(torch.nn.Linear(2, 2))
        >>> isinstance(model, FSDPModule), isinstance(model, torch.nn.Linear)
        (True, True)
        >>> model.set_requires_gradient_sync(False)
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        self._sharded()
        passed: Passed = vars(self)[PASSED]
        if passed.outer is None and len({one.reduces for one in passed_in(self)}) > 1:
            raise UnsupportedError(
                "set_requires_gradient_sync has set some modules to reduce and others not to; set all of a model alike"
            )
        return super().__call__(*args, **kwargs)

    def _sharded(self) -> ShardedTree:
        passed: Passed = vars(self)[PASSED]
        return passed.sharded()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parts, by the names of the whole parameters."""
        if not vars(self)[PASSED].root().is_being_sharded:
            self._sharded()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The whole state; every rank calls it."""
        del args
        tree = self._sharded()
        if tree.shown is None or keep_vars:  # the runtime's own way to look at what there is
            return super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        with tree.whole():
            made = tree.runtime._made(self, StateKind())
        named = {prefix + name: value for name, value in made.items()}
        if destination is None:
            return named
        destination.update(named)
        return destination

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Take over a whole state; every rank calls it."""
        if assign:
            _refuse("load_state_dict(assign=True)", "values are copied into this rank's parts; leave assign out")
        tree = self._sharded()
        if tree.shown is None:
            return super().load_state_dict(state_dict, strict=strict)
        with tree.whole():
            tree.runtime.load_state_dict(self, state_dict, strict=strict)
            return incompatible_keys(self, state_dict)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters ahead of its forward; every rank calls it."""
        runner = self._sharded().runner
        units = [] if runner is None else runner.bring_together(self)
        for unit in units:
            unit.start()

        def wait() -> None:
            for unit in units:
                unit.bring()

        if async_op:
            return UnshardHandle(wait)
        wait()
        return None

    def reshard(self) -> None:
        """Put this module's whole parameters away."""
        runner = self._sharded().runner
        for unit in [] if runner is None else runner.params_of(self):
            unit.put_away(lent_too=True)

    def reset_iter_state(self) -> None:
        """Go on after an exception that ended a forward or backward: its gradients are dropped; every rank calls it."""
        passed: Passed = vars(self)[PASSED]
        if passed.root() is not passed:
            raise ConfigError("reset_iter_state is for the whole model; call it on the outermost module")
        self._sharded().start_over()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients, or only accumulates them; in the end the same for all modules."""
        root = vars(self)[PASSED].root()
        for one in passed_in(self) if recurse else [vars(self)[PASSED]]:
            one.reduces = requires_gradient_sync
        watch = getattr(self._sharded().holder, "watch", None)
        if watch is not None and len({one.reduces for one in passed_in(root.module)}) == 1:
            watch.paused = not requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters go between forward and backward."""
        runner = self._sharded().runner
        for one in self.modules() if recurse else [self]:
            if runner is not None:
                runner.keep_after_forward(one, not reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters go after backward, or stay for the next forward until a step changes them."""
        runner = self._sharded().runner
        for one in self.modules() if recurse else [self]:
            if runner is not None:
                runner.stay_after_backward(one, not reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Which modules are asked for when this one computes; otherwise what came next in the last forward."""
        self._fetch_ahead("forward", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Which modules are asked for when this one's gradients are computed; otherwise the one before it."""
        self._fetch_ahead("backward", modules)

    def _fetch_ahead(self, direction: Direction, modules: list[FSDPModule]) -> None:
        for one in modules:
            if not isinstance(one, FSDPModule):
                raise ConfigError(f"only modules that were passed to fully_shard are asked for ahead, got {type(one)}")
        runner = self._sharded().runner
        if runner is not None:
            runner.fetch_ahead(direction, self, modules)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Refused where replicas would not be brought together."""
        del recurse
        if not requires_all_reduce:
            _refuse("set_requires_all_reduce(False)", "use set_requires_gradient_sync(False) while accumulating")

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Refused unless it is what happens anyway."""
        world_size = self._sharded().runtime.world_size
        if factor != world_size:
            _refuse(f"set_gradient_divide_factor({factor})", f"gradients are divided by {world_size}; scale the loss")

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        """Refused: how gradients travel is the backend's business."""
        _refuse("set_all_reduce_hook", _PLUGIN)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Refused: how parameters travel is the backend's business."""
        _refuse("set_custom_all_gather", _PLUGIN)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Refused: how gradients travel is the backend's business."""
        _refuse("set_custom_reduce_scatter", _PLUGIN)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refused: memory that travels is a bucket's, not a staging buffer's."""
        if enable:
            _refuse("set_allocate_memory_from_process_group_for_comm(True)", _PLUGIN)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refused: memory that travels is a bucket's, not a staging buffer's."""
        _refuse(f"set_symm_mem_for_comm({backend!r})", _PLUGIN)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """A hint that is not needed: a parameter that only some ranks used is always reduced on all."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """A hint that is not followed: two buckets of gradients are in memory at most."""
        if type(max_input_buffers) is not int or max_input_buffers < 1:
            raise ConfigError(f"max_input_buffers={max_input_buffers!r} is not possible; give a number from 1 up")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """A hint that is not followed: the backend says whether gathers and reductions may run at once."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """A hint that is not needed: a backend that cannot average is asked for sums, which are divided."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """A hint that is not needed: gradients are handed out after every synchronised backward."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """A hint that is not followed: parameters are always there in backward."""

    def set_post_optim_event(self, event: Any) -> None:
        """A hint that is not needed: parameters are gathered in the order of the program, after the step."""


_PLUGIN = "write a backend plugin (docs/writing-a-plugin.md)"


def _refuse(what: str, instead: str) -> None:
    raise UnsupportedError(f"{what} is not possible with this fully_shard; {instead}")

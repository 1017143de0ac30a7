"""torch's ``fully_shard`` (FSDP2), translated onto the runtime.

Modules stay the objects they are, and get a class of their own beside theirs, as there. See Note [Sharded at first
use]: the outermost module that was passed is the whole, those inside it are its units.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardrt.compat.sharded_tree import ShardedTree, TreeSettings, hybrid_groups
from shardrt.errors import ConfigError, UnsupportedError
from shardrt.state.kinds import StateKind

_STATE = "_shardrt_fully_sharded"


@attrs.define(eq=False)
class _Passed:
    """A module that was passed to ``fully_shard``."""

    module: torch.nn.Module
    settings: TreeSettings
    outer: _Passed | None = None
    tree: ShardedTree | None = None
    is_being_sharded: bool = False

    def root(self) -> _Passed:
        found = self
        while found.outer is not None:
            found = found.outer
        return found

    def sharded(self) -> ShardedTree:
        """The tree it is in, made when it is first asked for."""
        root = self.root()
        if root.tree is None:
            inner = [one for one in _passed_in(root.module) if one is not root]
            root.is_being_sharded = True
            try:
                root.tree = ShardedTree(root.module, _together(root.settings, inner))
            finally:
                root.is_being_sharded = False
        return root.tree


def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Any = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[torch.nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Takes what ``torch.distributed.fsdp.fully_shard`` takes, and does what it documents, on any device.

    Parameters become this rank's parts for any elementwise optimizer of torch's; scalars, mixed dtypes and weights that
    are tied across modules are fine. ``module.state_dict()`` is the whole state, which every rank must ask for.

    Example:
        >>> import torch
        >>> from shardrt.compat import fully_shard
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> for layer in model:
        ...     _ = fully_shard(layer)
        >>> _ = fully_shard(model)
        >>> opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> opt.step()
    """
    if isinstance(module, (list, tuple)):
        options = (mesh, reshard_after_forward, shard_placement_fn, mp_policy, offload_policy, ignored_params)
        names = ("mesh", "reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy", "ignored_params")
        return [fully_shard(one, **dict(zip(names, options, strict=True))) for one in module]
    if not isinstance(module, torch.nn.Module) or isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        raise ConfigError(f"fully_shard takes a module that has a forward, got a {type(module).__name__}")
    if shard_placement_fn is not None or dp_mesh_dims is not None:
        raise UnsupportedError(
            "shard_placement_fn and dp_mesh_dims lay out DTensors; here parameters are cut into even runs of elements: "
            "leave them out"
        )
    if _STATE in vars(module):
        raise ConfigError("fully_shard was called with this module before; call it once for each module")
    group, groups = hybrid_groups(None, mesh)
    passed = _Passed(
        module,
        TreeSettings(
            strategy="FULL_SHARD" if groups is None else "HYBRID_SHARD",
            process_group=group,
            mesh=groups,
            mixed_precision=mp_policy if mp_policy is not None and mp_policy != MixedPrecisionPolicy() else None,
            offload=offload_policy,
            ignored_parameters=tuple(ignored_params or ()),
            reshard_after_forward=reshard_after_forward,
        ),
    )
    for inner in _passed_in(module):
        if inner.tree is not None:
            raise ConfigError(
                "a module inside this one was used before, and is sharded by itself; call fully_shard for everything "
                "first, for the whole last, and use it then"
            )
        if inner.outer is None:
            inner.outer = passed
    vars(module)[_STATE] = passed
    module.__class__ = _class_beside(type(module))  # type: ignore[arg-type]
    return module


def _passed_in(module: torch.nn.Module) -> list[_Passed]:
    return [vars(one)[_STATE] for one in module.modules() if _STATE in vars(one)]


def _together(settings: TreeSettings, inner: list[_Passed]) -> TreeSettings:
    """The settings of the whole, from those of all modules that were passed."""
    for one in inner:
        for name in ("strategy", "process_group", "mixed_precision", "offload"):
            mine, other = getattr(settings, name), getattr(one.settings, name)
            if mine != other and not (name == "offload" and type(mine) is type(other)):
                raise ConfigError(
                    f"{type(one.module).__name__} was passed to fully_shard with {name}={other!r}, the whole with "
                    f"{mine!r}; modules of one model are sharded alike: pass the same to all"
                )
    wanted = {
        True if one.settings.reshard_after_forward is None else one.settings.reshard_after_forward for one in inner
    }
    numbers = {one for one in wanted if not isinstance(one, bool)}
    if len(numbers) > 1 or (numbers and len(wanted) > 1):
        raise ConfigError(
            f"reshard_after_forward is {sorted(wanted, key=str)} for different modules; numbers must agree"
        )
    return attrs.evolve(
        settings,
        units=[one.module for one in inner],
        ignored_parameters=(
            *settings.ignored_parameters,
            *(p for one in inner for p in one.settings.ignored_parameters),
        ),
        reshard_after_forward=next(iter(numbers), True),
        keeps_after_forward=tuple(one.module for one in inner if one.settings.reshard_after_forward is False),
    )


@functools.cache
def _class_beside(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {"__doc__": kind.__doc__})


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
        return super().__call__(*args, **kwargs)

    def _sharded(self) -> ShardedTree:
        passed: _Passed = vars(self)[_STATE]
        return passed.sharded()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parts, by the names of the whole parameters."""
        if not vars(self)[_STATE].root().is_being_sharded:
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
        tree = self._sharded()
        if tree.shown is None:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        with tree.whole():
            tree.runtime.load_state_dict(self, state_dict, strict=strict)
        return torch.nn.modules.module._IncompatibleKeys([], [])

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters ahead of its forward; every rank calls it."""
        runner = self._sharded().runner
        units = [] if runner is None else runner.params_of(self)
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

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients, or only accumulates them; for the whole model."""
        del recurse
        watch = getattr(self._sharded().holder, "watch", None)
        if watch is not None:
            watch.paused = not requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters go between forward and backward."""
        runner = self._sharded().runner
        for one in self.modules() if recurse else [self]:
            if runner is not None:
                runner.keep_after_forward(one, not reshard_after_forward)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Refused where replicas would not be brought together."""
        del recurse
        if not requires_all_reduce:
            _refuse("set_requires_all_reduce(False)", "use set_requires_gradient_sync(False) while accumulating")

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """A hint that is not needed: gradients are handed out after every synchronised backward."""

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """A hint that is not followed: parameters always go after backward."""

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """A hint that is not needed: what is gathered ahead is known from the order of the last forward."""

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """A hint that is not needed: what is gathered ahead is known from the order of forward."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Refused unless it is what happens anyway."""
        world_size = self._sharded().runtime.world_size
        if factor != world_size:
            _refuse(f"set_gradient_divide_factor({factor})", f"gradients are divided by {world_size}; scale the loss")

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        """Refused: how gradients travel is the backend's business."""
        _refuse("set_all_reduce_hook", "write a backend plugin (docs/writing-a-plugin.md)")

    set_custom_all_gather = set_custom_reduce_scatter = set_all_reduce_hook


def _refuse(what: str, instead: str) -> None:
    raise UnsupportedError(f"{what} is not possible with this fully_shard; {instead}")


def register_fsdp_forward_method(module: torch.nn.Module, method_name: str) -> None:
    """Let another method of a module find whole parameters, as its forward does.

    Example:
        >>> import torch
        >>> from shardrt.compat import fully_shard, register_fsdp_forward_method
        >>> class Net(torch.nn.Linear):
        ...     def encode(self, x): return self(x)
        >>> net = fully_shard(Net(2, 2))
        >>> register_fsdp_forward_method(net, "encode")
        >>> net.encode(torch.ones(1, 2)).shape
        torch.Size([1, 2])
    """
    passed: _Passed | None = vars(module).get(_STATE)
    if passed is None:
        return
    method = getattr(module, method_name)

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        runner = passed.sharded().runner
        if runner is None:
            return method(*args, **kwargs)
        return runner.run_as_forward(module, method, args, kwargs)

    vars(module)[method_name] = run

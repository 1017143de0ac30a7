"""torch's ``fully_shard`` (FSDP2), translated onto the runtime.

Modules stay the objects they are, and get a class of their own beside theirs, as there. See Note [Sharded at first
use]: the outermost module that was passed is the whole, those inside it are its units.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardrt.compat.fsdp_module import FSDPModule
from shardrt.compat.passed_modules import PASSED, Passed, passed_in
from shardrt.compat.sharded_tree import TreeSettings, hybrid_groups
from shardrt.errors import ConfigError, UnsupportedError


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
        return [
            fully_shard(
                one,
                mesh=mesh,
                reshard_after_forward=reshard_after_forward,
                shard_placement_fn=shard_placement_fn,
                mp_policy=mp_policy,
                offload_policy=offload_policy,
                ignored_params=ignored_params,
                dp_mesh_dims=dp_mesh_dims,
            )
            for one in module
        ]
    if not isinstance(module, torch.nn.Module) or isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        raise ConfigError(f"fully_shard takes a module that has a forward, got a {type(module).__name__}")
    if shard_placement_fn is not None or dp_mesh_dims is not None:
        raise UnsupportedError(
            "shard_placement_fn and dp_mesh_dims lay out DTensors; here parameters are cut into even runs of elements: "
            "leave them out"
        )
    if PASSED in vars(module):
        raise ConfigError("fully_shard was called with this module before; call it once for each module")
    policy = mp_policy or MixedPrecisionPolicy()
    precision = dataclasses.replace(policy, output_dtype=None)
    computes_low = (precision.param_dtype, precision.reduce_dtype) != (None, None)
    group, groups = hybrid_groups(None, mesh)
    passed = Passed(
        module,
        TreeSettings(
            strategy="FULL_SHARD" if groups is None else "HYBRID_SHARD",
            process_group=group,
            mesh=groups,
            mixed_precision=precision if computes_low else None,
            offload=offload_policy or OffloadPolicy(),
            ignored_parameters=tuple(ignored_params or ()),
            reshard_after_forward=reshard_after_forward,
        ),
        output_dtype=policy.output_dtype,
    )
    for inner in passed_in(module):
        if inner.tree is not None:
            raise ConfigError(
                "a module inside this one was used before, and is sharded by itself; call fully_shard for everything "
                "first, for the whole last, and use it then"
            )
        if inner.outer is None:
            inner.outer = passed
    vars(module)[PASSED] = passed
    module.__class__ = _class_beside(type(module))  # type: ignore[arg-type]
    return module


@functools.cache
def _class_beside(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {"__doc__": kind.__doc__})


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
    passed: Passed | None = vars(module).get(PASSED)
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


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """A hint that is not needed: a backend's own streams serve every module of a process.

    Example:
        >>> import torch
        >>> from shardrt.compat import fully_shard, share_comm_ctx
        >>> share_comm_ctx([fully_shard(torch.nn.Linear(2, 2)), fully_shard(torch.nn.Linear(2, 2))])
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ConfigError(f"share_comm_ctx takes modules that were passed to fully_shard, got {type(module)}")

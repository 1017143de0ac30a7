"""The hooks, their types and their versions. Registration hooks are plural nouns; lifecycle hooks are past events.

A plugin is a module or an object with functions marked by ``shardrt.hookimpl``, found through the entry-point group
``shardrt`` or handed to ``Runtime(plugins=[...])``. An implementation may take fewer arguments than its
specification: hooks grow by new arguments, and retire through warnings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

from shardrt.registry.records import (
    BackendRecord,
    JoinPolicyRecord,
    PartitionerRecord,
    PlaceRecord,
    ScheduleRecord,
    StateFormatRecord,
)

if TYPE_CHECKING:
    from shardrt.plan.plan import Plan
    from shardrt.runtime import Runtime

PROJECT = "shardrt"
HOOK_VERSION = (1, 1)
"""Major and minor version of everything in this file. A plugin says which it was made for with a module attribute
``SHARDRT_HOOK_VERSION = "1.0"``: the major must be ours and the minor not newer. Without the attribute it is 1.0."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def shardrt_partitioners() -> Iterable[PartitionerRecord]:
    """Offer partitioning policies. Called once while a runtime is built. Since 1.0.

    Example:
        >>> import shardrt
        >>> class Plugin:
        ...     @shardrt.hookimpl
        ...     def shardrt_partitioners(self):
        ...         yield shardrt.PartitionerRecord(name="mine", summary="my policy", factory=object)
        >>> shardrt.load_registry(plugins=[Plugin()]).partitioners.get("mine").summary
        'my policy'
    """
    raise NotImplementedError


@hookspec
def shardrt_backends() -> Iterable[BackendRecord]:
    """Offer communication backends, one record per device type. Called once while a runtime is built. Since 1.0.

    Example:
        >>> import shardrt
        >>> class Plugin:
        ...     @shardrt.hookimpl
        ...     def shardrt_backends(self):
        ...         yield shardrt.BackendRecord(name="mine", device_type="cpu", summary="my wires", factory=object)
        >>> shardrt.load_registry(plugins=[Plugin()]).backends.get("cpu", "mine").summary
        'my wires'
    """
    raise NotImplementedError


@hookspec
def shardrt_schedules() -> Iterable[ScheduleRecord]:
    """Offer overlap schedules. Called once while a runtime is built. Since 1.0.

    Example:
        >>> import shardrt
        >>> class Plugin:
        ...     @shardrt.hookimpl
        ...     def shardrt_schedules(self):
        ...         yield shardrt.ScheduleRecord(name="mine", summary="my order", factory=object)
        >>> shardrt.load_registry(plugins=[Plugin()]).schedules.get("mine").summary
        'my order'
    """
    raise NotImplementedError


@hookspec
def shardrt_state_formats() -> Iterable[StateFormatRecord]:
    """Offer file formats for sharded state. Called once while a runtime is built. Since 1.0.

    Example:
        >>> import shardrt
        >>> class Plugin:
        ...     @shardrt.hookimpl
        ...     def shardrt_state_formats(self):
        ...         yield shardrt.StateFormatRecord(name="mine", summary="my files", factory=object)
        >>> shardrt.load_registry(plugins=[Plugin()]).state_formats.get("mine").summary
        'my files'
    """
    raise NotImplementedError


@hookspec
def shardrt_places() -> Iterable[PlaceRecord]:
    """Offer places for checkpoints: local disks, network file systems, stores. Called once while a runtime is built.
    Since 1.1.

    Example:
        >>> import shardrt
        >>> class Plugin:
        ...     @shardrt.hookimpl
        ...     def shardrt_places(self):
        ...         yield shardrt.PlaceRecord(name="mine", summary="my disks", factory=object)
        >>> shardrt.load_registry(plugins=[Plugin()]).places.get("mine").summary
        'my disks'
    """
    raise NotImplementedError


@hookspec
def shardrt_join_policies() -> Iterable[JoinPolicyRecord]:
    """Offer ways to go on when ranks run out of inputs. Called once while a runtime is built. Since 1.1.

    Example:
        >>> import shardrt
        >>> class Plugin:
        ...     @shardrt.hookimpl
        ...     def shardrt_join_policies(self):
        ...         yield shardrt.JoinPolicyRecord(name="mine", summary="my average", factory=object)
        >>> shardrt.load_registry(plugins=[Plugin()]).join_policies.get("mine").summary
        'my average'
    """
    raise NotImplementedError


@hookspec
def shardrt_plan_built(runtime: Runtime, plan: Plan) -> None:
    """All ranks have agreed on a plan. Called on every rank, once per optimizer and again when it changes. Since 1.0.

    Example:
        >>> import shardrt, torch
        >>> class Observer:
        ...     @shardrt.hookimpl
        ...     def shardrt_plan_built(self, plan):
        ...         print(len(plan.params), "parameter on", plan.world_size, "rank")
        >>> with shardrt.Runtime(plugins=[Observer()]) as rt:
        ...     opt = rt.optimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.SGD, lr=0.1)
        1 parameter on 1 rank
    """
    raise NotImplementedError


@hookspec
def shardrt_step_finished(runtime: Runtime, step: int, seconds: float) -> None:
    """An update is complete on this rank; ``step`` counts from 1.

    The step path calls no hooks: implementations are looked up once, when the optimizer is built, and called as plain
    functions; without any, nothing is called and no clock is read. Since 1.0.

    Example:
        >>> import shardrt, torch
        >>> class Observer:
        ...     @shardrt.hookimpl
        ...     def shardrt_step_finished(self, step):
        ...         print("step", step)
        >>> with shardrt.Runtime(plugins=[Observer()]) as rt:
        ...     opt = rt.optimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.SGD, lr=0.1)
        ...     opt.step()
        step 1
    """
    raise NotImplementedError


@hookspec
def shardrt_checkpoint_committed(runtime: Runtime, path: str, step: int) -> None:
    """A checkpoint exists wholly and durably at ``path``. Called on every rank. Since 1.0.

    Example:
        >>> import shardrt
        >>> class Observer:
        ...     @shardrt.hookimpl
        ...     def shardrt_checkpoint_committed(self, path):
        ...         print("saved", path)
        >>> shardrt.load_registry(plugins=[Observer()]).hook.shardrt_checkpoint_committed(
        ...     runtime=None, path="ckpt", step=1)
        saved ckpt
        []
    """
    raise NotImplementedError


@hookspec
def shardrt_rank_failed(runtime: Runtime, rank: int, error: str) -> None:
    """This rank learnt that ``rank`` (it may be itself) failed or went missing; the error is raised next. Since 1.0.

    Example:
        >>> import shardrt
        >>> class Observer:
        ...     @shardrt.hookimpl
        ...     def shardrt_rank_failed(self, rank, error):
        ...         print(f"rank {rank}: {error}")
        >>> shardrt.load_registry(plugins=[Observer()]).hook.shardrt_rank_failed(
        ...     runtime=None, rank=2, error="out of memory")
        rank 2: out of memory
        []
    """
    raise NotImplementedError

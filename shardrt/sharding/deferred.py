"""Modules on the meta device: materialised, initialised and divided unit by unit, so that no rank ever has the whole.

Note [Deferred initialisation]: a unit's parameters get memory, its modules initialise them (``reset_parameters``, or
the user's function), rank 0's values go to everybody, each rank keeps its shards, and the memory is given back before
the next unit's turn. Under strategies that keep whole parameters it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardrt.errors import ConfigError
from shardrt.optim.initial import broadcast_values
from shardrt.optim.readers import watch_reads
from shardrt.plan import Plan, Shard
from shardrt.protocols import Communicator
from shardrt.sharding.units import Unit

Init = Callable[[torch.nn.Module], Any]


def is_deferred(module: torch.nn.Module) -> bool:
    """Whether any parameter has no memory yet."""
    return any(param.is_meta for param in module.parameters())


def check_initialisable(units: Sequence[Unit], init: Init | None) -> None:
    """Raise unless every module with a parameter on the meta device can initialise it."""
    if init is not None:
        if not callable(init):
            raise ConfigError(f"param_init_fn={init!r} is not possible; pass a function of a module")
        return
    for unit in units:
        for name, module in _modules_of(unit):
            if not callable(getattr(module, "reset_parameters", None)):
                raise ConfigError(
                    f"module {name!r} ({type(module).__name__}) has parameters on the meta device and no "
                    "reset_parameters() to initialise them; give it one, or pass param_init_fn=a function of a module"
                )


class _NotBuilt:
    """Stands for a unit between its initialisation and the end of building."""

    def read(self) -> None:
        raise ConfigError("a parameter was read while its module was being sharded")


@torch.no_grad()
def materialise(
    root: torch.nn.Module,
    units: Sequence[Unit],
    plan: Plan,
    communicator: Communicator,
    *,
    device: torch.device,
    place: int,
    init: Init | None,
    keeps_whole: bool,
) -> dict[Shard, torch.Tensor]:
    """This rank's shards of everything that was on the meta device. See Note [Deferred initialisation].

    ``place`` is its number among those that divide the state.
    """
    kept: dict[Shard, torch.Tensor] = {}
    named = dict(root.named_parameters())
    for unit in units:
        modules = [module for _, module in _modules_of(unit)]
        for module in modules:
            _give_memory(module, device)
        for module in modules:
            init(module) if init is not None else module.reset_parameters()  # type: ignore[operator]
        params = [named[name] for name in unit.params]
        buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
        if communicator.world_size > 1:
            broadcast_values([*params, *buffers], communicator, source=0)
        if keeps_whole:
            continue
        for name, param in zip(unit.params, params, strict=True):
            flat = param.detach().reshape(-1)
            for shard in plan.partition.by_param[name]:
                if shard.rank == place:
                    part = flat[shard.start : shard.stop].clone()
                    kept[shard] = part.view(param.shape) if shard.numel == param.numel() else part
            param.data = param.detach().clone()  # of its own, whatever the initialisation did
            param.untyped_storage().resize_(0)
        watch_reads(params, _NotBuilt())
    return kept


def _modules_of(unit: Unit) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules that have the unit's parameters on the meta device, with their names."""
    wanted = {name.rpartition(".")[0] for name in unit.params}
    prefix = f"{unit.name}." if unit.name else ""
    for name, module in unit.module.named_modules():
        full = f"{prefix}{name}" if name else unit.name
        if full in wanted and any(param.is_meta for param in module.parameters(recurse=False)):
            yield full, module


def _give_memory(module: torch.nn.Module, device: torch.device) -> None:
    for param in module.parameters(recurse=False):
        if param.is_meta:
            real = torch.nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
            vars(real).update(vars(param))
            torch.utils.swap_tensors(param, real)  # type: ignore[no-untyped-call] # the same object for its holders
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            setattr(module, name, torch.empty_like(buffer, device=device))

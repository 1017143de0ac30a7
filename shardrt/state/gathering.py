"""A sharded model brought together, or handed out from the first rank, in bounded windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardrt.optim.managed import ManagedOptimizer
from shardrt.plan import Shard
from shardrt.protocols import Communicator
from shardrt.state.models import ModelState, OwnParts, answering
from shardrt.state.streams import Stream, gather_streams


def whole_model(
    state: ModelState,
    optimizers: Sequence[ManagedOptimizer],
    communicator: Communicator,
    *,
    to: int | None,
    device: torch.device,
    on_cpu: bool,
) -> dict[str, Any]:
    """The whole state as a module's ``state_dict`` has it, in memory of its own; every rank calls it.

    With ``to`` only that rank gets it, and the others an empty mapping.
    """
    own = OwnParts(state, optimizers)
    owners = answering(state, optimizers, communicator.world_size)
    sharded = {name: shards for name, shards in owners.items() if name in state.apart}
    order = _by_rank(sharded, communicator.world_size)
    wanted = to is None or to == communicator.rank
    made: dict[str, torch.Tensor] = {}
    if wanted:
        for name, tensor in state.tensors.items():
            where = torch.device("cpu") if on_cpu else tensor.device
            if name in state.apart:
                made[name] = torch.empty(tensor.shape, dtype=state.dtype(name), device=where)
            else:
                made[name] = tensor.detach().to(where, dtype=state.dtype(name), copy=True)

    def place(rank: int, number: int) -> torch.Tensor | None:
        shard = order[rank][number]
        return made[shard.param].view(-1)[shard.start : shard.stop] if wanted else None

    _gather(state, order, communicator, own.read, place, to=to, device=device)
    if not wanted:
        return {}
    return {**made, **{alias: made[name] for alias, name in state.aliases.items()}, **state.values}


def write_whole(state: ModelState, optimizers: Sequence[ManagedOptimizer], values: Mapping[str, torch.Tensor]) -> None:
    """Give this rank's parts of tensors that are kept apart their values from whole ones."""
    own = OwnParts(state, optimizers)
    for name in state.apart:
        if name in values:
            flat = values[name].detach().reshape(-1)
            for shard in own.of(name):
                own.write(shard, flat[shard.start : shard.stop])


def hand_out_apart(
    state: ModelState,
    optimizers: Sequence[ManagedOptimizer],
    values: Mapping[str, torch.Tensor],
    names: Sequence[str],
    communicator: Communicator,
    device: torch.device,
) -> None:
    """The first rank has whole values of tensors that are kept apart: every rank gets its parts."""
    own = OwnParts(state, optimizers)
    owners = answering(state, optimizers, communicator.world_size)
    parts = [shard for name in names for shard in owners[name]]
    order = [parts if rank == 0 else [] for rank in range(communicator.world_size)]
    arrived: dict[int, torch.Tensor] = {}
    mine = {(shard.param, shard.start, shard.stop) for name in names for shard in own.of(name)}

    def give(shard: Shard) -> torch.Tensor:
        whole = values[shard.param].to(state.dtype(shard.param))
        return whole.detach().reshape(-1)[shard.start : shard.stop]

    def place(_: int, number: int) -> torch.Tensor | None:
        shard = parts[number]
        if (shard.param, shard.start, shard.stop) not in mine:
            return None
        if number not in arrived:
            arrived[number] = torch.empty(shard.numel, dtype=state.dtype(shard.param), device=device)
        return arrived[number]

    _gather(state, order, communicator, give, place, to=None, device=device)
    for number, part in arrived.items():
        own.write(parts[number], part)


def _by_rank(owners: Mapping[str, Sequence[Shard]], world_size: int) -> list[list[Shard]]:
    return [
        [shard for shards in owners.values() for shard in shards if shard.rank == rank] for rank in range(world_size)
    ]


def _gather(
    state: ModelState,
    order: Sequence[Sequence[Shard]],
    communicator: Communicator,
    give: Any,
    place: Any,
    *,
    to: int | None,
    device: torch.device,
) -> None:
    with torch.no_grad():
        gather_streams(
            communicator,
            [Stream([shard.numel * state.dtype(shard.param).itemsize for shard in mine]) for mine in order],
            lambda number: give(order[communicator.rank][number]),
            place,
            to=to,
            device=device,
        )

"""State dicts of one rank's part: made without a word to the others, and put together again by any number of ranks.

A *sharded* state dict says of each piece which elements of which parameter it is, so that ranks with any other
partition can load it, each bringing one or several of them. A *local* one is what this rank's optimizer keeps, as it
is, and only fits the very plan it came from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from shardrt.errors import StateError
from shardrt.optim.managed import ManagedOptimizer
from shardrt.protocols import Communicator, ControlChannel
from shardrt.state.layout import Giving, Part, StateLayout, describe, lay_out
from shardrt.state.models import ModelState, OwnParts, answering
from shardrt.state.optimizers import ShardState, Tree, as_tree, group_names, group_options, own_state, stored_names
from shardrt.state.portable import dtype_called
from shardrt.state.streams import gather_streams

FORMAT = 1
MARK = "shardrt"
"""The key by which these are told from torch's."""


def _mark(kind: str, what: str, optimizer_plan: str | None, rank: int, world_size: int) -> dict[str, Any]:
    return {
        "kind": kind,
        "of": what,
        "format": FORMAT,
        "rank": rank,
        "world_size": world_size,
        "plan": optimizer_plan,
    }


def sharded_optimizer_state(optimizer: ManagedOptimizer, rank: int, world_size: int, *, on_cpu: bool) -> dict[str, Any]:
    """This rank's part of an optimizer's state; its tensors are the optimizer's own unless they have to be moved."""
    names = stored_names(optimizer)
    state: dict[str, Any] = {}
    for shard in own_state(optimizer, names):
        sliced = {key: _moved(tensor, on_cpu) for key, tensor in shard.sliced.items()}
        whole = {key: _moved_tree(tree.value(), on_cpu) for key, tree in shard.trees.items()}
        entry = state.setdefault(shard.param, {"shape": list(shard.shape), "shards": []})
        entry["shards"].append({"start": shard.start, "stop": shard.stop, "sliced": sliced, "whole": whole})
    return {
        MARK: {
            **_mark("sharded", "optimizer", optimizer.plan.fingerprint, rank, world_size),
            "steps": optimizer.steps_taken,
        },
        "state": state,
        "param_groups": [
            {**options, "params": params}
            for options, params in zip(group_options(optimizer), group_names(optimizer, names), strict=True)
        ],
    }


def local_optimizer_state(optimizer: ManagedOptimizer, rank: int, world_size: int, *, on_cpu: bool) -> dict[str, Any]:
    """What this rank's optimizer keeps, by the number of its shard."""
    kept = optimizer.local_state()
    return {
        MARK: {
            **_mark("local", "optimizer", optimizer.plan.fingerprint, rank, world_size),
            "steps": optimizer.steps_taken,
        },
        "state": {
            number: {key: _moved_tree(value, on_cpu) for key, value in kept[stepped].items()}
            for number, (_, stepped) in enumerate(optimizer.owned())
            if kept.get(stepped)
        },
        "param_groups": group_options(optimizer),
    }


def sharded_model_state(
    state: ModelState, optimizers: Sequence[ManagedOptimizer], rank: int, world_size: int, *, on_cpu: bool
) -> dict[str, Any]:
    """This rank's part of a model; tensors are views of the model's own unless they have to be moved."""
    tensors: dict[str, Any] = {}
    own = OwnParts(state, optimizers)
    for name, owners in answering(state, optimizers, world_size).items():
        for shard in owners:
            if shard.rank == rank:
                entry = tensors.setdefault(name, {"shape": list(state.tensors[name].shape), "shards": []})
                part = _moved(own.read(shard), on_cpu)
                run = {"start": shard.start, "stop": shard.stop}
                entry["shards"].append({**run, "sliced": {"value": part}, "whole": {}})
    return {
        MARK: _mark("sharded", "model", None, rank, world_size),
        "state": tensors,
        "aliases": dict(state.aliases),
        "extra_state": dict(state.values) if rank == 0 else {},
    }


def _moved(tensor: torch.Tensor, on_cpu: bool) -> torch.Tensor:
    return tensor.detach().cpu() if on_cpu else tensor.detach()


def _moved_tree(value: Any, on_cpu: bool) -> Any:
    return _moved(value, on_cpu) if isinstance(value, torch.Tensor) else value


def read_parts(given: Any, of: str) -> list[Mapping[str, Any]]:
    """One sharded state dict or several, checked."""
    parts = list(given) if isinstance(given, (list, tuple)) else [given]
    for part in parts:
        mark = part.get(MARK) if isinstance(part, Mapping) else None
        if not isinstance(mark, Mapping) or mark.get("kind") != "sharded" or mark.get("of") != of:
            raise StateError(
                f"expected sharded state dicts of a {of}, got {_kind(part)}; pass what rt gave, one or several"
            )
        if mark.get("format") != FORMAT:
            raise StateError(f"a sharded state dict has format {mark.get('format')!r}; this version reads {FORMAT}")
    if not parts:
        raise StateError(f"expected sharded state dicts of a {of}, got an empty list")
    return parts


def _kind(part: object) -> str:
    return (
        f"a mapping with {', '.join(map(repr, list(part)[:4]))}" if isinstance(part, Mapping) else type(part).__name__
    )


@attrs.frozen(kw_only=True)
class Wanted:
    """Elements of a parameter that this rank is to get."""

    param: str
    start: int
    stop: int


def collect_parts(
    parts: Sequence[Mapping[str, Any]],
    wanted: Sequence[Wanted],
    shapes: Mapping[str, tuple[int, ...]],
    communicator: Communicator,
    control: ControlChannel,
    device: torch.device,
) -> list[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """For each wanted range the values of its elements, flat, and those of its parameter as a whole, from whichever
    rank has brought them.

    Every rank calls it with what it has; together they must have every element of every parameter in ``shapes``.
    """
    mine = [shard for part in parts for shard in _shards(part)]
    layout = lay_out(control.exchange("sharded state dicts", describe(mine)))
    _check_complete(layout, shapes)
    own = Giving(layout, mine, control.rank)
    needed = {one.param for one in wanted}
    arrived: dict[tuple[int, int], torch.Tensor] = {}

    def place(rank: int, number: int) -> torch.Tensor | None:
        part = layout.parts[rank][number]
        if part.param not in needed or not (part.name is not None or _touches(part, wanted)):
            return None
        if (rank, number) not in arrived:
            arrived[rank, number] = torch.empty(part.spec.shape, dtype=dtype_called(part.spec.dtype), device=device)
        return arrived[rank, number]

    streams = [layout.stream(rank) for rank in range(control.world_size)]
    gather_streams(communicator, streams, own, place, to=None, device=device)
    by_param: dict[str, list[tuple[Part, torch.Tensor]]] = {}
    for (rank, number), tensor in arrived.items():
        part = layout.parts[rank][number]
        by_param.setdefault(part.param, []).append((part, tensor))
    return [_assembled(one, layout, by_param.get(one.param, []), device) for one in wanted]


def _touches(part: Part, wanted: Sequence[Wanted]) -> bool:
    return any(one.param == part.param and part.start < one.stop and one.start < part.stop for one in wanted)


def _check_complete(layout: StateLayout, shapes: Mapping[str, tuple[int, ...]]) -> None:
    strange = [name for name in layout.shapes if name not in shapes]
    if strange:
        raise StateError(
            f"the sharded state dicts have {strange[0]!r}, which is not here; load them into the same model"
        )
    for name, shape in shapes.items():
        if name not in layout.shapes:
            raise StateError(
                f"none of the sharded state dicts has {name!r}; hand over those of all ranks that made them, each rank "
                "one or several"
            )
        if layout.shapes[name] != tuple(shape):
            raise StateError(
                f"{name!r} has shape {list(layout.shapes[name])} in the state dicts and {list(shape)} here"
            )
        for key in layout.sliced[name]:
            runs = sorted({(p.start, p.stop) for ps in layout.parts for p in ps if (p.param, p.key) == (name, key)})
            reached = 0
            for start, stop in runs:
                if start > reached:
                    break
                reached = max(reached, stop)
            if reached < math.prod(shape):
                raise StateError(
                    f"no sharded state dict has element {reached} of {key!r} of {name!r}; hand over those of all ranks "
                    "that made them, each rank one or several"
                )


def _assembled(
    one: Wanted, layout: StateLayout, found: Sequence[tuple[Part, torch.Tensor]], device: torch.device
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    sliced: dict[str, torch.Tensor] = {}
    whole: dict[str, Any] = {}
    for key, tree in layout.trees.get(one.param, {}).items():
        tensors = {part.name: tensor for part, tensor in found if part.key == key and part.name is not None}
        whole[key] = Tree(tree=tree, tensors=_with_empty(tensors, layout, one.param, key)).value()
    for key, dtype in layout.sliced.get(one.param, {}).items():
        flat = torch.empty(one.stop - one.start, dtype=dtype_called(dtype), device=device)
        for part, tensor in found:
            low, high = max(part.start, one.start), min(part.stop, one.stop)
            if part.key == key and part.name is None and low < high:
                flat[low - one.start : high - one.start] = tensor[low - part.start : high - part.start]
        sliced[key] = flat
    return sliced, whole


def _with_empty(tensors: dict[str, torch.Tensor], layout: StateLayout, param: str, key: str) -> dict[str, torch.Tensor]:
    """Tensors without elements do not travel."""
    for parts in layout.parts:
        for part in parts:
            if (part.param, part.key) == (param, key) and part.name is not None and part.name not in tensors:
                tensors[part.name] = torch.empty(part.spec.shape, dtype=dtype_called(part.spec.dtype))
    return tensors


def _shards(part: Mapping[str, Any]) -> list[ShardState]:
    found = []
    for name, entry in part["state"].items():
        for shard in entry["shards"]:
            sliced = dict(shard["sliced"])
            trees = {
                key: as_tree(value, key, where=f"state {key!r} of {name!r}") for key, value in shard["whole"].items()
            }
            found.append(
                ShardState(
                    param=name,
                    shape=tuple(entry["shape"]),
                    start=shard["start"],
                    stop=shard["stop"],
                    sliced=sliced,
                    trees=trees,
                )
            )
    return found

"""Loading: each rank reads what it answers for, verified; only when all ranks have all of it is anything changed.

Note [Read, agree, apply]: whatever is wrong with a checkpoint is found while reading, on whichever rank, and raised on
all of them with the run as it was. What a rank reads of an optimizer's state becomes that state; of a model it reads
the part it answers for, and the parts are then spread in windows, so that no byte is read from files by two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import attrs
import torch

from shardrt.checkpoint.manifest import Spread, StoredOptimizer, StoredParam
from shardrt.checkpoint.opened import OpenCheckpoint
from shardrt.errors import StateError
from shardrt.optim.managed import ManagedOptimizer
from shardrt.plan import Shard
from shardrt.protocols import Communicator
from shardrt.state.models import ModelState, OwnParts, answering, model_state, unwrapped
from shardrt.state.optimizers import class_name, group_names, put_options, stored_names
from shardrt.state.portable import dtype_called
from shardrt.state.streams import Stream, gather_streams

Advance = Callable[[int], None]


@attrs.frozen(kw_only=True, eq=False)
class ReadModel:
    """This rank's part of a model, read and verified."""

    state: ModelState
    module: torch.nn.Module
    shards: Mapping[str, tuple[Shard, ...]]
    """Of the tensors that are loaded."""
    parts: Mapping[Shard, torch.Tensor]
    own: OwnParts
    values: Mapping[str, Any]


@attrs.frozen(kw_only=True, eq=False)
class ReadOptimizer:
    """This rank's part of an optimizer's state, read and verified."""

    optimizer: ManagedOptimizer
    state: dict[torch.Tensor, dict[str, Any]]
    options: list[dict[str, Any]] | None
    step: int


def read_model(
    checkpoint: OpenCheckpoint,
    name: str,
    module: torch.nn.Module,
    optimizers: Mapping[str, ManagedOptimizer],
    *,
    rank: int,
    world_size: int,
    strict: bool,
    advance: Advance,
) -> ReadModel:
    """Read this rank's part of a model; nothing is changed."""
    stored = checkpoint.manifest.models[name]
    state = model_state(module)
    spreads = {**stored.tensors, **{alias: stored.tensors[key] for alias, key in stored.aliases.items()}}
    found: dict[str, Spread] = {}
    aliases: dict[str, list[str]] = {}
    for alias, target in state.aliases.items():
        aliases.setdefault(target, []).append(alias)
    for key in state.tensors:
        match = next((one for one in (key, *aliases.get(key, ())) if one in spreads), None)
        if match is not None:
            found[key] = spreads[match]
    values = checkpoint.mapping(stored.values, 0, what=f"extra state of {name!r}")
    known = {*state.tensors, *state.aliases, *state.values}
    missing = [key for key in (*state.tensors, *state.values) if key not in found and key not in values]
    unexpected = [key for key in (*spreads, *values) if key not in known]
    if strict and (missing or unexpected):
        raise StateError(_does_not_fit(f"model {name!r}", checkpoint, missing, unexpected))
    own = OwnParts(state, optimizers.values())
    shards = {key: owners for key, owners in answering(state, optimizers.values(), world_size).items() if key in found}
    parts: dict[Shard, torch.Tensor] = {}
    for key, owners in shards.items():
        tensor, spread = state.tensors[key], found[key]
        if tuple(tensor.shape) != spread.spec.shape:
            raise StateError(
                f"{key!r} has shape {list(spread.spec.shape)} in {checkpoint.where!r} and {list(tensor.shape)} in the "
                "model; load it into the same model"
            )
        if tensor.is_complex() != dtype_called(spread.spec.dtype).is_complex:
            raise StateError(
                f"{key!r} is {spread.spec.dtype} in {checkpoint.where!r} and {tensor.dtype} in the model; complex "
                "numbers and real ones are not taken for one another"
            )
        for shard in own.of(key) if key in state.apart else [one for one in owners if one.rank == rank]:
            if shard.numel or key not in state.apart:
                part = torch.empty(shard.numel, dtype=dtype_called(spread.spec.dtype))
                checkpoint.files.read_spread(spread, shard.start, shard.stop, part, advance)
                parts[shard] = part.to(state.dtype(key))
    kept = {key: value for key, value in values.items() if key in state.values}
    return ReadModel(state=state, module=module, shards=shards, parts=parts, own=own, values=kept)


def apply_model(read: ReadModel, communicator: Communicator, device: torch.device) -> None:
    """Spread the parts into the model, in place. Of what is sharded every rank has read just its own."""
    apart_ones = read.state.apart
    order: list[list[Shard]] = [[] for _ in range(communicator.world_size)]
    for name, owners in read.shards.items():
        for shard in owners if name not in apart_ones else ():
            order[shard.rank].append(shard)
    tensors = read.state.tensors
    with torch.no_grad():
        for shard, part in read.parts.items():
            if shard.param in apart_ones:
                read.own.write(shard, part)
    apart = {  # whose elements do not lie in row-major order: gathered beside, then copied
        name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device=tensors[name].device)
        for name in read.shards
        if name not in apart_ones and not tensors[name].is_contiguous()
    }

    def place(rank: int, number: int) -> torch.Tensor:
        shard = order[rank][number]
        whole = apart.get(shard.param, tensors[shard.param]).detach()
        return whole.view(-1)[shard.start : shard.stop]

    with torch.no_grad():
        gather_streams(
            communicator,
            [Stream([shard.numel * tensors[shard.param].element_size() for shard in mine]) for mine in order],
            lambda number: read.parts[order[communicator.rank][number]],
            place,
            to=None,
            device=device,
        )
        for name, values in apart.items():
            tensors[name].detach().copy_(values)
        torch.autograd.graph.increment_version([tensors[name] for name in read.shards])
    if read.values:
        unwrapped(read.module).load_state_dict(dict(read.values), strict=False)


def read_optimizer(
    checkpoint: OpenCheckpoint,
    name: str,
    optimizer: ManagedOptimizer,
    models: Mapping[str, torch.nn.Module],
    *,
    strict: bool,
    advance: Advance,
) -> ReadOptimizer:
    """Read the state of this rank's shards; nothing is changed."""
    optimizer.check_between_steps("loading")
    stored = checkpoint.manifest.optimizers[name]
    kind = class_name(optimizer)
    # By the last part of the name: people write torch.optim.AdamW for what calls itself torch.optim.adamw.AdamW.
    if strict and stored.kind and stored.kind.rpartition(".")[2] != kind.rpartition(".")[2]:
        raise StateError(
            f"{checkpoint.where!r} has the state of a {stored.kind}, and optimizer {name!r} is a {kind}; build the "
            "same optimizer, load the model alone, or pass strict=False if one understands the other's state"
        )
    names = stored_names(optimizer, models.values())
    known = set(names.values())
    missing = [key for key in names.values() if key not in stored.params]
    unexpected = [key for key in stored.params if key not in known]
    if strict and (missing or unexpected):
        raise StateError(_does_not_fit(f"optimizer {name!r}", checkpoint, missing, unexpected))
    whole = optimizer.named()
    on_device = {
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if group.get("fused") or group.get("capturable")
    }
    state: dict[torch.Tensor, dict[str, Any]] = {}
    for shard, stepped in optimizer.owned():
        param = stored.params.get(names[shard.param])
        if param is None:
            continue
        if tuple(whole[shard.param].shape) != param.shape:
            raise StateError(
                f"parameter {names[shard.param]!r} has shape {list(param.shape)} in {checkpoint.where!r} and "
                f"{list(whole[shard.param].shape)} here; load it into the same model"
            )
        counts_on_device = whole[shard.param] in on_device
        values = _values(checkpoint, names[shard.param], param, shard, stepped, advance, counts_on_device)
        if values:
            state[stepped] = values
    options = _options(checkpoint, stored, optimizer, group_names(optimizer, names), strict=strict)
    return ReadOptimizer(optimizer=optimizer, state=state, options=options, step=stored.step)


def _values(
    checkpoint: OpenCheckpoint,
    name: str,
    param: StoredParam,
    shard: Shard,
    stepped: torch.Tensor,
    advance: Advance,
    counts_on_device: bool,
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, (file, tree) in param.trees.items():
        value = checkpoint.tree(tree, file, what=f"optimizer state {key!r} of {name!r}")
        # Tensors go where the parameter is, but for the count of steps, unless a kernel on the device reads it.
        if isinstance(value, torch.Tensor) and (key != "step" or counts_on_device):
            value = value.to(stepped.device)
        values[key] = value
    same_dtype = str(stepped.dtype).removeprefix("torch.") == param.dtype
    for key, spread in param.sliced.items():
        flat = torch.empty(shard.numel, dtype=dtype_called(spread.spec.dtype))
        checkpoint.files.read_spread(spread, shard.start, shard.stop, flat, advance)
        # As torch does: state follows a parameter that has another dtype now. Otherwise it stays what it was.
        follows = not same_dtype and stepped.is_floating_point() and flat.is_floating_point()
        dtype = stepped.dtype if follows else flat.dtype
        if stepped.is_contiguous() and stepped.device.type == "cpu" and dtype == flat.dtype:
            values[key] = flat.view(stepped.shape)
        else:
            values[key] = torch.empty_like(stepped, dtype=dtype, requires_grad=False)
            values[key].copy_(flat.view(stepped.shape))
    return values


def _options(
    checkpoint: OpenCheckpoint,
    stored: StoredOptimizer,
    optimizer: ManagedOptimizer,
    groups: list[list[str]],
    *,
    strict: bool,
) -> list[dict[str, Any]] | None:
    theirs = [set(params) for _, params in stored.groups]
    ours = [set(params) for params in groups]
    if theirs != ours:
        if strict:
            raise StateError(
                f"the optimizer in {checkpoint.where!r} has parameter groups of {[len(g) for g in theirs]} parameters, "
                f"this one of {[len(g) for g in ours]}, or the groups hold other parameters; build the same groups, or "
                "pass strict=False to keep this optimizer's options"
            )
        return None
    found = [checkpoint.mapping(options, 0, what="group options") for options, _ in stored.groups]
    for options, group in zip(found, optimizer.param_groups, strict=True):
        for key, value in options.items():
            if key in ("params", "param_names") or not _is_alike(value, group.get(key)):
                raise StateError(
                    f"the option {key!r} of a group in {checkpoint.where!r} is {str(value)[:60]}, which cannot take "
                    f"the place of {str(group.get(key))[:60]}"
                )
    return found


def _is_alike(value: Any, held: Any) -> bool:
    """Whether an option may follow another: numbers follow numbers, and pairs pairs. Most optimizers do not look."""
    if value is None or held is None:
        return True
    number = (Number, torch.Tensor)
    if isinstance(held, number):
        return isinstance(value, number)
    if isinstance(held, (tuple, list)):
        return isinstance(value, (tuple, list)) and len(value) == len(held) and all(map(_is_alike, value, held))
    return type(value) is type(held)


def apply_optimizer(read: ReadOptimizer) -> None:
    """Let the optimizer go on from what was read."""
    if read.options is not None:
        put_options(read.optimizer, read.options)
    read.optimizer.replace_state(read.state)
    read.optimizer.steps_taken = read.step


def _does_not_fit(what: str, checkpoint: OpenCheckpoint, missing: list[str], unexpected: list[str]) -> str:
    def some(kind: str, names: list[str]) -> str:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return f"; {kind}: {', '.join(map(repr, names[:5]))}{more}" if names else ""

    return (
        f"{what} in {checkpoint.where!r} does not fit{some('it lacks', missing)}{some('it also has', unexpected)}; "
        "load it into the same model, or pass strict=False to take what fits"
    )

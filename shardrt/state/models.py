"""A module's tensors as stored state sees them: by plain names, each once, with the rank that answers for each part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from shardrt.errors import StateError, UnsupportedError
from shardrt.optim.kept import kept_dtype, stored_dtypes
from shardrt.optim.managed import ManagedOptimizer
from shardrt.plan import Shard, spread_largest_first
from shardrt.state.optimizers import plain_name


@attrs.frozen(kw_only=True, eq=False)
class ModelState:
    """What a module's state dict consists of."""

    tensors: Mapping[str, torch.Tensor]
    """Parameters and buffers, each under its first name: the module's own, not copies."""
    aliases: Mapping[str, str]
    """Further names of tensors that have several (tied weights), and the name that each is stored under."""
    values: Mapping[str, Any]
    """What modules keep beside tensors (``get_extra_state``)."""
    buffers: frozenset[str]
    apart: Mapping[str, torch.dtype] = attrs.field(factory=dict)
    """Parameters whose values count in the shards of their owners, and those shards' dtype: no rank has them whole, or
    only in a lower precision, so only parts of them are read or written."""

    stored: Mapping[str, torch.dtype] = attrs.field(factory=dict)
    """Buffers that are stored in another dtype than they are computed with."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that a tensor is stored in."""
        return self.apart.get(name) or self.stored.get(name) or self.tensors[name].dtype


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DistributedDataParallel and torch.compile.

    Example:
        >>> import torch
        >>> from shardrt.state.models import unwrapped
        >>> model = torch.nn.Linear(2, 2)
        >>> unwrapped(torch.nn.DataParallel(model)) is model
        True
    """
    while True:
        if isinstance(module, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), torch.nn.Module):
            module = inner
        else:
            return module


def model_state(module: torch.nn.Module) -> ModelState:
    """What there is to store of a module."""
    inner = unwrapped(module)
    trained = {id(param) for param in inner.parameters()}
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    values: dict[str, Any] = {}
    buffers: set[str] = set()
    apart: dict[str, torch.dtype] = {}
    first: dict[int, str] = {}
    for key, value in inner.state_dict(keep_vars=True).items():
        name = plain_name(key)
        if name in tensors or name in aliases or name in values:
            raise StateError(f"two entries of the module's state are called {name!r} once wrappers are left out")
        if not isinstance(value, torch.Tensor):
            values[name] = value
        elif id(value) in first:
            aliases[name] = first[id(value)]
        else:
            kept = kept_dtype(value)
            if kept is not None:
                apart[name] = kept
            else:
                _check_storable(name, value)
            first[id(value)] = name
            tensors[name] = value
            if id(value) not in trained:
                buffers.add(name)
    return ModelState(
        tensors=tensors,
        aliases=aliases,
        values=values,
        buffers=frozenset(buffers),
        apart=apart,
        stored={name: dtype for name, dtype in _stored(inner) if name in tensors},
    )


def _stored(module: torch.nn.Module) -> Iterator[tuple[str, torch.dtype]]:
    for prefix, inner in module.named_modules():
        for name, dtype in stored_dtypes(inner).items():
            yield plain_name(f"{prefix}.{name}" if prefix else name), dtype


def _check_storable(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise UnsupportedError(f"{name!r} is on the meta device: it has no values; materialise the module first")
    if tensor.layout is not torch.strided or type(tensor.data) is not torch.Tensor:
        raise UnsupportedError(
            f"{name!r} is a {type(tensor.data).__name__} of layout {tensor.layout}; only plain dense tensors are stored"
        )


def answering(
    state: ModelState, optimizers: Iterable[ManagedOptimizer], world_size: int
) -> dict[str, tuple[Shard, ...]]:
    """Which rank stores (and reads) which part of each tensor.

    Trained parameters: whoever steps them. Other parameters: whole, spread evenly. Buffers: the first rank, since they
    may differ between ranks (running statistics) and a mixture would be nobody's.
    """
    owners: dict[torch.Tensor, list[tuple[Shard, int]]] = {}
    load = [0] * world_size
    for optimizer in optimizers:
        for name, tensor in optimizer.named().items():
            shards = optimizer.plan.partition.by_param[name]
            owners[tensor] = [(shard, optimizer.rank_of(shard)) for shard in shards]
    found: dict[str, tuple[Shard, ...]] = {}
    left: list[str] = []
    for name, tensor in state.tensors.items():
        if tensor in owners:
            found[name] = tuple(Shard(name, shard.start, shard.stop, rank) for shard, rank in owners[tensor])
            for shard in found[name]:
                load[shard.rank] += shard.numel * tensor.element_size()
        elif name in state.buffers:
            found[name] = (Shard(name, 0, tensor.numel(), 0),)
        else:
            left.append(name)
    sizes = [state.tensors[name].nbytes for name in left]
    for name, rank in zip(left, spread_largest_first(sizes, load), strict=True):
        found[name] = (Shard(name, 0, state.tensors[name].numel(), rank),)
    return {name: found[name] for name in state.tensors}


def part_of(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """A flat range of a tensor's elements in row-major order: a view where they lie so."""
    return tensor.detach().reshape(-1)[start:stop]


class OwnParts:
    """This rank's parts of a model's tensors: of those kept apart the shards it has, of the others views."""

    def __init__(self, state: ModelState, optimizers: Iterable[ManagedOptimizer]) -> None:
        self._state = state
        names = {id(tensor): name for name, tensor in state.tensors.items()}
        self._kept: dict[tuple[str, int, int], torch.Tensor] = {}
        for optimizer in optimizers if state.apart else ():
            whole = optimizer.named()
            for shard, stepped in optimizer.owned():
                name = names.get(id(whole[shard.param]))
                if name is not None:
                    self._kept[name, shard.start, shard.stop] = stepped

    def of(self, name: str) -> list[Shard]:
        """This rank's shards of a tensor that is kept apart, whether it answers for them or not."""
        return [Shard(name, start, stop, -1) for key, start, stop in self._kept if key == name]

    def read(self, shard: Shard) -> torch.Tensor:
        """The values of one of this rank's shards, flat."""
        if shard.param in self._state.apart:
            return self._kept[shard.param, shard.start, shard.stop].detach().reshape(-1)
        return part_of(self._state.tensors[shard.param], shard.start, shard.stop).to(self._state.dtype(shard.param))

    def write(self, shard: Shard, values: torch.Tensor) -> None:
        """Give one of this rank's shards of a tensor that is kept apart new values."""
        kept = self._kept[shard.param, shard.start, shard.stop]
        kept.detach().copy_(values.reshape(kept.shape))


def copies(state: ModelState, *, on_cpu: bool) -> dict[str, Any]:
    """The state as a module's ``state_dict`` has it, in memory of its own; tied tensors stay one tensor."""
    made = {
        name: tensor.detach().to("cpu" if on_cpu else tensor.device, dtype=state.dtype(name), copy=True)
        for name, tensor in state.tensors.items()
    }
    return {**made, **{alias: made[name] for alias, name in state.aliases.items()}, **state.values}


def misfits(module: torch.nn.Module, given: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Names that a full state lacks and names that the module lacks, each in their order.

    Example:
        >>> import torch
        >>> from shardrt.state.models import misfits
        >>> misfits(torch.nn.Linear(2, 1), {"weight": torch.zeros(1, 2), "scale": 1})
        (['bias'], ['scale'])
    """
    state = model_state(module)
    known = dict.fromkeys((*state.tensors, *state.aliases, *state.values))
    by_name = {plain_name(key): value for key, value in given.items()}
    missing = [name for name in known if name not in by_name and state.aliases.get(name) not in by_name]
    # A tied weight may have been stored under any of its names.
    missing = [name for name in missing if not any(a in by_name for a, n in state.aliases.items() if n == name)]
    return missing, [name for name in by_name if name not in known]


def matched(
    module: torch.nn.Module, given: Mapping[str, Any], *, strict: bool
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What of a full state goes into which tensor of the module, and what else; checked before anything is changed."""
    state = model_state(module)
    by_name = {plain_name(key): value for key, value in given.items()}
    missing, unexpected = misfits(module, given)
    if strict and (missing or unexpected):
        listed = ", ".join(filter(None, (_listed("missing", missing), _listed("unexpected", unexpected))))
        raise StateError(
            f"the state does not fit the module: {listed}; load it into the same model, or pass strict=False to take "
            "what fits"
        )
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for name, value in by_name.items():
        target = state.aliases.get(name, name)
        if target in state.tensors:
            check_shape(name, state.tensors[target], value)
            tensors.setdefault(target, value)
        elif name in state.values:
            values[name] = value
    return tensors, values


def check_shape(name: str, target: torch.Tensor, value: Any) -> None:
    """A stored tensor must have the shape of the one it goes into."""
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(target.shape):
        got = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise StateError(
            f"{name!r} is {got} in the state and has shape {list(target.shape)} in the module; load it into the same "
            "model"
        )


def _listed(kind: str, names: Sequence[str], limit: int = 5) -> str:
    if not names:
        return ""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{kind} {', '.join(map(repr, names[:limit]))}{more}"

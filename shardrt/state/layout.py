"""Who keeps which part of an optimizer's state: what ranks tell one another before bytes move."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from shardrt.errors import StateError
from shardrt.protocols import TensorSpec
from shardrt.state.optimizers import ShardState, spec_of
from shardrt.state.streams import Stream


@attrs.frozen(kw_only=True)
class Part:
    """One tensor of one rank's stream: a slice of a parameter's state, or a tensor of a tree."""

    param: str
    key: str
    spec: TensorSpec
    """Of what travels: a slice is flat."""
    start: int = 0
    name: str | None = None
    """The tensor's name in its tree; None for a slice."""

    @property
    def stop(self) -> int:
        """Where a slice ends in its parameter."""
        return self.start + math.prod(self.spec.shape)


@attrs.frozen(kw_only=True)
class StateLayout:
    """The state of one optimizer over all ranks, without the values."""

    shapes: Mapping[str, tuple[int, ...]]
    sliced: Mapping[str, Mapping[str, str]]
    """By parameter and key, the dtype."""
    trees: Mapping[str, Mapping[str, Any]]
    """By parameter and key, the tree without its tensors."""
    keys: Mapping[str, tuple[str, ...]]
    """By parameter, all keys in the order in which the optimizer made them."""
    parts: tuple[tuple[Part, ...], ...]
    """By rank: what it gives, in order."""

    def stream(self, rank: int) -> Stream:
        """The sizes of what one rank gives."""
        return Stream([part.spec.nbytes for part in self.parts[rank]])


def describe(state: Sequence[ShardState]) -> list[Any]:
    """What a rank tells the others of its part, as JSON values."""
    return [
        [
            shard.param,
            list(shard.shape),
            shard.start,
            shard.stop,
            {key: str(tensor.dtype).removeprefix("torch.") for key, tensor in shard.sliced.items()},
            {
                key: [tree.tree, {name: attrs.astuple(spec_of(tensor)) for name, tensor in tree.tensors.items()}]
                for key, tree in shard.trees.items()
            },
            list(_order(shard)),
        ]
        for shard in state
    ]


def _order(shard: ShardState) -> list[str]:
    return [*shard.trees, *shard.sliced]


def lay_out(told: Sequence[Sequence[Any]]) -> StateLayout:
    """All ranks' descriptions put together; refuses shards of one parameter that keep different things."""
    shapes: dict[str, tuple[int, ...]] = {}
    sliced: dict[str, dict[str, str]] = {}
    trees: dict[str, dict[str, Any]] = {}
    keys: dict[str, tuple[str, ...]] = {}
    parts: list[tuple[Part, ...]] = []
    for rank, shards in enumerate(told):
        given: list[Part] = []
        for param, shape, start, stop, dtypes, values, order in shards:
            first = param not in shapes
            shapes.setdefault(param, tuple(shape))
            keys.setdefault(param, tuple(order))
            known = sliced.setdefault(param, dict(dtypes))
            if known != dtypes or set(keys[param]) != set(order):
                raise StateError(
                    f"rank {rank} keeps {sorted(order)} for elements {start} to {stop} of {param!r}, and another rank "
                    f"{sorted(keys[param])} for the rest of it; its shards were not stepped alike: step them together"
                )
            given += [
                Part(param=param, key=key, spec=TensorSpec(dtype=dtype, shape=(stop - start,)), start=start)
                for key, dtype in dtypes.items()
            ]
            if first:
                trees[param] = {key: tree for key, (tree, _) in values.items()}
                given += [
                    Part(
                        param=param,
                        key=key,
                        name=name,
                        spec=TensorSpec(dtype=dtype, shape=tuple(tensor_shape)),
                    )
                    for key, (_, tensors) in values.items()
                    for name, (dtype, tensor_shape) in tensors.items()
                ]
        parts.append(tuple(given))
    return StateLayout(shapes=shapes, sliced=sliced, trees=trees, keys=keys, parts=tuple(parts))


class Giving:
    """The tensors of one rank's stream, by their number."""

    def __init__(self, layout: StateLayout, own: Sequence[ShardState], rank: int) -> None:
        self._parts = layout.parts[rank]
        self._sliced = {(shard.param, shard.start): shard for shard in own}
        self._first: dict[str, ShardState] = {}
        for shard in own:
            self._first.setdefault(shard.param, shard)

    def __call__(self, number: int) -> torch.Tensor:
        part = self._parts[number]
        if part.name is None:
            return self._sliced[part.param, part.start].sliced[part.key]
        return self._first[part.param].trees[part.key].tensors[part.name]

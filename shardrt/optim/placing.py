"""This rank's shards: the objects that its optimizer holds, and where in the buckets each of them lives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from shardrt.optim.buffers import BucketBuffers
from shardrt.optim.gradients import BucketAtWork, OwnedShard
from shardrt.optim.params import NamedParam, parameter_for
from shardrt.optim.residence import OWN_PRECISION, PrecisionOf, Residence
from shardrt.optim.slots import frozen_shard
from shardrt.plan import Partition, Shard


def owned_shards(
    params: Iterable[NamedParam],
    partition: Partition,
    rank: int,
    *,
    residence: Residence,
    precision: PrecisionOf,
    values: Mapping[Shard, torch.Tensor],
) -> Iterator[OwnedShard]:
    """The shards of some parameters that a rank owns; ``values`` of those that nobody has whole."""
    for param in params:
        apart = not residence.params or residence.offload or precision(param.name) != OWN_PRECISION
        for shard in partition.by_param[param.name]:
            if shard.rank == rank:
                stepped = parameter_for(param, shard, apart=apart, values=values.get(shard))
                yield OwnedShard(shard=shard, stepped=stepped)


def place_owned_shards(
    owned: Mapping[Shard, OwnedShard],
    params: Mapping[str, NamedParam],
    buckets: Sequence[BucketAtWork],
    still: Sequence[BucketBuffers],
) -> None:
    """Let each shard live in the bucket that has it."""
    for one in owned.values():
        one.slot = one.gradient = None
    for bucket in buckets:
        buffers = bucket.buffers
        for index, slot in enumerate(buffers.slots):
            for offset, shard in slot.offsets:
                mine = owned.get(shard)
                if mine is None:
                    continue
                mine.slot = slot
                _put(mine, buffers.shard_of(slot, offset, shard), keeps=buffers.shard_is_apart)
                if buffers.reduced is not None:
                    mine.gradient = buffers.reduced_gradient_of(slot, offset, shard)
                bucket.owned.append((index, mine))
    for buffers in still:
        for slot in buffers.slots:
            for offset, shard in slot.offsets:
                if shard in owned:
                    owned[shard].stepped.grad = None
                    _put(owned[shard], buffers.shard_of(slot, offset, shard), keeps=buffers.shard_is_apart)
    in_still = {name for buffers in still for name in buffers.bucket.params}
    for one in owned.values():
        if one.slot is None and one.shard.param not in in_still:
            one.stepped.grad = None
            one.stepped.data = frozen_shard(one.shard, params[one.shard.param])


def _put(owned: OwnedShard, place: torch.Tensor, *, keeps: bool) -> None:
    """Let a shard live in a bucket. It ``keeps`` its values where they count; else they are there already."""
    if keeps:
        place.copy_(owned.stepped.detach())
    owned.stepped.data = place

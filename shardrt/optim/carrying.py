"""What buckets hold between steps: reduced gradients from one layout to the next, and parameters from shards apart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import attrs
import torch

from shardrt.comm.waiting import start_and_wait
from shardrt.comm.works import FollowedWork
from shardrt.optim.buffers import BucketBuffers
from shardrt.optim.gradients import BucketAtWork
from shardrt.plan import Shard
from shardrt.protocols import Communicator, Work


@attrs.define(kw_only=True, eq=False)
class Carried:
    """Reduced gradients on their way from one layout of buckets to the next."""

    present: dict[str, int] = attrs.field(factory=dict)
    """By parameter: whether any rank had a gradient."""
    gradients: dict[Shard, torch.Tensor] = attrs.field(factory=dict)


def carried_by(buckets: Iterable[BucketAtWork]) -> Carried:
    """What was reduced since ``zero_grad``, where that is the only trace of gradients."""
    found = Carried()
    for bucket in buckets:
        if bucket.accumulated is None:
            continue
        for slot, there in zip(bucket.buffers.slots, bucket.accumulated.tolist(), strict=True):
            found.present[slot.param.name] = int(there)
        for _, owned in bucket.owned:
            assert owned.gradient is not None
            found.gradients[owned.shard] = owned.gradient
    return found


def carry_on(buckets: Iterable[BucketAtWork], earlier: Carried) -> None:
    """Go on from what buckets that were laid out otherwise had reduced."""
    for bucket in buckets if earlier.present else ():
        flags = [earlier.present.get(slot.param.name, 0) for slot in bucket.buffers.slots]
        bucket.accumulated = torch.tensor(flags, dtype=torch.int8, device=bucket.present.device)
        for _, owned in bucket.owned:
            assert owned.gradient is not None
            before = earlier.gradients.get(owned.shard)
            owned.gradient.zero_() if before is None else owned.gradient.copy_(before)


def forget(buckets: Iterable[BucketAtWork], *, keep_zeros: bool) -> None:
    """Drop what was reduced, where that is the only trace of gradients; or keep it as zeros."""
    for bucket in buckets:
        if bucket.accumulated is None:
            continue
        if keep_zeros and bucket.buffers.reduced is not None:
            bucket.buffers.reduced.zero_()
        else:
            bucket.accumulated = None


def forget_some(buckets: Iterable[BucketAtWork], names: Collection[str]) -> None:
    """Drop what was reduced of some parameters, where that is the only trace of gradients."""
    for bucket in buckets:
        if bucket.accumulated is None:
            continue
        for index, slot in enumerate(bucket.buffers.slots):
            if slot.param.name in names:
                bucket.accumulated[index] = 0
        for _, owned in bucket.owned:
            if owned.shard.param in names and owned.gradient is not None:
                owned.gradient.zero_()


def spread_parameters(every: Sequence[BucketBuffers], communicator: Communicator) -> None:
    """Gather whole parameters that stay from shards that are apart from them."""
    apart = [buffers for buffers in every if buffers.shard_is_apart and buffers.residence.params]

    def gather(buffers: BucketBuffers) -> Work:
        buffers.load_own_run()
        gathering = communicator.all_gather(buffers.params, buffers.bucket.splits)
        return FollowedWork([gathering], then=buffers.store_staged)

    start_and_wait(gather, apart)
    torch.autograd.graph.increment_version([slot.param.tensor for one in apart for slot in one.slots])

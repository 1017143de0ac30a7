"""Whole parameters outside forward and backward, in their own precision, for whoever wants to look or to write."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from shardrt.optim.buffers import BucketBuffers
from shardrt.optim.readers import Readable, let_read, watch_reads, watched_by
from shardrt.optim.slots import Slot, shaped
from shardrt.protocols import Communicator


@contextmanager
def summoned(
    buffers: Sequence[BucketBuffers],
    wanted: Collection[torch.Tensor],
    communicator: Communicator,
    *,
    lends: bool,
    writeback: bool,
    offload_to_cpu: bool,
) -> Iterator[None]:
    """In this block parameters whose values are kept in shards have all of them; every rank enters it alike.

    ``lends``: whether this rank gets them too.
    """
    lent = []
    try:
        for one in buffers:
            if one.shard_is_apart and any(slot.param.tensor in wanted for slot in one.slots):
                whole = _gathered(one, communicator)
                if lends:
                    lent.append(_Lent(one, whole.cpu() if offload_to_cpu else whole))
                del whole
        yield
    finally:
        for loan in lent:
            loan.end(writeback=writeback)


def _gathered(one: BucketBuffers, communicator: Communicator) -> torch.Tensor:
    whole = torch.empty(one.bucket.numel, dtype=one.shard.dtype, device=one.shard.device)
    whole[one.own_start : one.own_start + one.shard.numel()].copy_(one.shard)
    communicator.all_gather(whole, one.bucket.splits).wait()
    return whole


class _Lent:
    """The parameters of one bucket while they have all their values."""

    def __init__(self, one: BucketBuffers, whole: torch.Tensor) -> None:
        self._one = one
        self._whole = whole
        self._before: list[tuple[Slot, torch.Tensor, Readable | None]] = []
        for slot in one.slots:
            tensor = slot.param.tensor
            with torch._C.DisableTorchFunctionSubclass():
                self._before.append((slot, tensor.data, watched_by(tensor)))
                let_read([tensor])
                tensor.data = self._place(slot)

    def _place(self, slot: Slot) -> torch.Tensor:
        like = slot.param.tensor
        if slot.in_one_piece:
            return shaped(self._whole, slot.offsets[0][0], like, keep_strides=slot.home is not None)
        flat = torch.empty(like.numel(), dtype=self._whole.dtype, device=self._whole.device)
        for offset, shard in slot.offsets:
            flat[shard.start : shard.stop] = self._whole[offset : offset + shard.numel]
        return flat.view(like.shape)

    def end(self, *, writeback: bool) -> None:
        """Give the parameters back what they had; what was written to them goes into this rank's shard."""
        for slot, data, readable in self._before:
            tensor = slot.param.tensor
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                if writeback:
                    self._write(slot)
                tensor.data = data
            if readable is not None:
                watch_reads([tensor], readable)

    def _write(self, slot: Slot) -> None:
        written = slot.param.tensor.detach()
        for offset, shard in slot.offsets:
            if shard.rank == self._one.rank:
                kept = self._one.shard_of(slot, offset, shard)
                whole = shard.numel == written.numel()
                kept.copy_(written.view(kept.shape) if whole else written.reshape(-1)[shard.start : shard.stop])
        torch.autograd.graph.increment_version([slot.param.tensor])

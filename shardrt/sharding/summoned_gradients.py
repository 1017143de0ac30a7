"""Whole reduced gradients in ``p.grad``, for whoever wants to read or write them between backward and step."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from shardrt.optim.gradients import BucketAtWork
from shardrt.optim.sharded import ShardedOptimizer
from shardrt.optim.slots import Slot, shaped
from shardrt.protocols import Communicator


class SummonedGradients:
    """The gradients of some parameters of an optimizer, whole, while the parameters are whole too.

    Before parameters are lent they are taken off them, and given back afterwards: the two may differ in dtype.
    """

    def __init__(self, optimizer: ShardedOptimizer, wanted: Collection[torch.Tensor], *, writeback: bool) -> None:
        optimizer.reduced_gradients(None)
        self._engine = optimizer.engine
        self._writeback = writeback
        self._loans = [
            _LentGradients(bucket)
            for bucket in self._engine.at_work
            if any(slot.param.tensor in wanted for slot in bucket.buffers.slots)
        ]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """In this block, inside that of whole parameters, ``p.grad`` is the reduced gradient."""
        for loan in self._loans:
            loan.begin(self._engine.gathers_with)
        try:
            yield
        finally:
            for loan in self._loans:
                loan.end(writeback=self._writeback)

    def restore(self) -> None:
        """``p.grad`` is what it was before."""
        for loan in self._loans:
            loan.restore()
        if not self._writeback:
            self._engine.forget_reduction()  # as if nobody had looked: the next backward may add to the gradients


class _LentGradients:
    """The gradients of one bucket while they are whole."""

    def __init__(self, bucket: BucketAtWork) -> None:
        self._bucket = bucket
        self._before = [slot.param.tensor.grad for slot in bucket.buffers.slots]
        for slot in bucket.buffers.slots:
            slot.param.tensor.grad = None

    def begin(self, communicator: Communicator) -> None:
        """Gather them."""
        buffers = self._bucket.buffers
        assert buffers.reduced is not None
        whole = torch.empty(buffers.bucket.numel, dtype=buffers.reduced.dtype, device=buffers.params.device)
        whole[buffers.own_start : buffers.own_start + buffers.reduced.numel()].copy_(buffers.reduced)
        communicator.all_gather(whole, buffers.bucket.splits).wait()
        for slot, there in zip(buffers.slots, self._bucket.present.tolist(), strict=False):
            slot.param.tensor.grad = _gradient(slot, whole) if there else None

    @torch.no_grad()
    def end(self, *, writeback: bool) -> None:
        """What was written goes into this rank's part of the reduced gradient."""
        for index, slot in enumerate(self._bucket.buffers.slots):
            written, slot.param.tensor.grad = slot.param.tensor.grad, None
            if writeback:
                self._write(index, written)

    def restore(self) -> None:
        """Give back what ``p.grad`` was."""
        for slot, before in zip(self._bucket.buffers.slots, self._before, strict=True):
            slot.param.tensor.grad = before
        self._bucket.note_gradients()

    def _write(self, index: int, written: torch.Tensor | None) -> None:
        bucket = self._bucket
        for flags in (bucket.present, bucket.accumulated):
            if flags is not None:
                flags[index] = int(written is not None)
        for at, owned in bucket.owned:
            if at != index or written is None:
                continue
            assert owned.gradient is not None
            whole = owned.shard.numel == written.numel()
            part = written if whole else written.reshape(-1)[owned.shard.start : owned.shard.stop]
            owned.gradient.copy_(part.view(owned.gradient.shape))


def _gradient(slot: Slot, whole: torch.Tensor) -> torch.Tensor:
    param = slot.param.tensor
    if slot.in_one_piece and slot.home is not None:
        return shaped(whole, slot.offsets[0][0], param, keep_strides=True).to(param.device, param.dtype, copy=True)
    flat = torch.empty(param.numel(), dtype=param.dtype, device=param.device)
    for offset, shard in slot.offsets:
        flat[shard.start : shard.stop] = whole[offset : offset + shard.numel]
    return flat.view(param.shape)

"""The memory of one bucket: parameters and gradients laid out as they travel, and the views that make copies needless.

Note [Homes]: a parameter whose shards lie side by side in its bucket lives there: ``p.data`` becomes a view of the
bucket's buffer, so gathering writes straight into the model. Where that is not possible (its storage is shared with
something else, or its strides are not row-major while it is cut) it stays where it is and is *staged*: copied into the
buffer before the step and out of it after the gather. Gradients are treated alike: an autograd hook moves a fresh
gradient into the bucket and leaves ``p.grad`` as a view of it, so that it exists once.

Note [Local gradients stay]: reductions write to a buffer of their own. ``p.grad`` is this rank's own gradient before
and after the step, so accumulating on, stepping twice or never zeroing mean what they mean without sharding.

Note [Coming and going]: under strategies that shard parameters or gradients too, the whole ones are there only while
somebody computes with them. Their memory is given back by resizing the storage to nothing, and obtained again by
resizing it back: views of it (``p.data``, what autograd has saved) then show what is gathered into it, so a forward
need not know that the memory went and came again in between. What stays is this rank's run of the parameters, which is
stepped, and of the reduced gradients, to which every further backward adds until ``zero_grad``.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from shardrt.errors import OptimizerError
from shardrt.optim.params import NamedParam
from shardrt.plan import Bucket, Shard


@attrs.frozen(kw_only=True)
class Residence:
    """Which buffers of a bucket stay in memory between their uses; the rest is given back and obtained again.

    See Note [Coming and going].
    """

    params: bool = True
    """The whole parameters. If they go, each rank keeps its own run apart."""
    gradients: bool = True
    """The whole gradients of this rank. If they go, what was reduced is kept, and later reductions add to it."""


RESIDENT = Residence()
"""Everything stays."""

_HOME = "_shardrt_home"
"""Attribute of a parameter that lives in a bucket of ours: the address it was given."""


@attrs.define(eq=False)
class Slot:
    """One parameter in one bucket: where its pieces are, and the views that stand for it there."""

    param: NamedParam
    offsets: list[tuple[int, Shard]]
    """Where each shard begins in the bucket's buffers, in element order."""
    gradient: torch.Tensor | None = None
    """The place of its gradient, in its shape; None where its pieces are apart."""
    home: torch.Tensor | None = None
    """The place ``p.data`` is a view of; None when it is staged."""

    @property
    def in_one_piece(self) -> bool:
        """Whether the shards lie side by side, in element order."""
        expected = self.offsets[0][0]
        for offset, shard in self.offsets:
            if offset != expected:
                return False
            expected += shard.numel
        return True


class BucketBuffers:
    """The buffers of one bucket on this rank."""

    def __init__(
        self,
        bucket: Bucket,
        params: Mapping[str, NamedParam],
        *,
        rank: int,
        holds_gradients: bool,
        holds_reduced: bool,
        residence: Residence = RESIDENT,
    ) -> None:
        """``holds_gradients``: this rank's own; ``holds_reduced``: the reduced ones of this rank's run."""
        self.bucket = bucket
        self.rank = rank
        self.residence = residence
        some = params[bucket.params[0]].tensor
        self.params = torch.empty(bucket.numel, dtype=some.dtype, device=some.device)
        self.slots = _slots(bucket, params)
        for slot in self.slots:
            self._settle(slot)
        self.staged = [slot for slot in self.slots if slot.home is None]
        self.own_start = sum(bucket.splits[:rank])
        self._own_run = self.params[self.own_start : self.own_start + bucket.splits[rank]]
        self.shard = self._own_run if residence.params else self._own_run.clone()
        """This rank's run of the parameters: what is stepped."""
        self.gradients: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None
        if holds_reduced:
            self.reduced = torch.zeros(bucket.splits[rank], dtype=some.dtype, device=some.device)
        if holds_gradients:
            self.gradients = torch.zeros_like(self.params)
            for slot in self.slots:
                if slot.in_one_piece:
                    slot.gradient = _shaped(
                        self.gradients, slot.offsets[0][0], slot.param.tensor, slot.home is not None
                    )
            if not residence.gradients:
                _give_back(self.gradients)

    def _settle(self, slot: Slot) -> None:
        tensor = slot.param.tensor
        if not self.residence.params and not _owns_storage(tensor):
            tensor.data = tensor.detach().clone()  # memory that can go without taking anything else with it
        if slot.in_one_piece and _may_move(tensor, cut=len(slot.offsets) > 1):
            home = _shaped(self.params, slot.offsets[0][0], tensor, keep_strides=True)
            home.copy_(tensor.detach())
            tensor.data = home
            setattr(tensor, _HOME, home.data_ptr())
            slot.home = home
        else:
            self._load(slot)

    def follow_moved_parameters(self) -> None:
        """A parameter whose data was replaced (``p.data = ...``) is brought home, with its new values."""
        if not self.residence.params:
            return
        for slot in self.slots:
            tensor = slot.param.tensor
            home = slot.home
            if home is None or tensor.data_ptr() == home.data_ptr() or not tensor.numel():
                continue
            check_unchanged(slot.param.name, home, tensor)
            home.copy_(tensor.detach())
            tensor.data = home

    def load_staged(self) -> None:
        """Copy staged parameters into the buffer, where their shards are stepped."""
        for slot in self.staged if self.residence.params else ():
            self._load(slot)

    def give_back_params(self) -> None:
        """The whole parameters are needed no more: only this rank's run stays."""
        for memory in self._whole_memory():
            _give_back(memory)

    def obtain_params(self) -> None:
        """Memory for the whole parameters, with this rank's run in it, to be gathered."""
        for memory in self._whole_memory():
            _obtain(memory)
        self._own_run.copy_(self.shard)

    def take_shard(self) -> None:
        """The whole parameters have new values: this rank's run follows."""
        if not self.residence.params:
            self.load_all()
            self.shard.copy_(self._own_run)

    def load_all(self) -> None:
        """Copy every parameter that is not at home into the buffer."""
        for slot in self.staged:
            self._load(slot)

    def _whole_memory(self) -> list[torch.Tensor]:
        return [self.params, *(slot.param.tensor.detach() for slot in self.staged)]

    def hold_gradients(self) -> None:
        """Memory for this rank's gradients, if it is not there."""
        if not self.residence.gradients and self.gradients is not None:
            _obtain(self.gradients)

    def drop_gradients(self) -> None:
        """They are on their way: ``p.grad`` shows them no more."""
        for slot in self.slots:
            slot.param.tensor.grad = None

    def give_back_gradients(self) -> None:
        """This rank's gradients have arrived at their owners."""
        if self.gradients is not None:
            _give_back(self.gradients)

    def store_staged(self) -> None:
        """Copy staged parameters out of the buffer after the gather."""
        for slot in self.staged:
            # Not detach: who gathers tells autograd if these are new values, and not if they only come back.
            whole = slot.param.tensor.data
            if slot.in_one_piece:
                whole.copy_(_shaped(self.params, slot.offsets[0][0], whole, keep_strides=False))
                continue
            flat = torch.empty(whole.numel(), dtype=whole.dtype, device=whole.device)
            for offset, shard in slot.offsets:
                flat[shard.start : shard.stop].copy_(self.params[offset : offset + shard.numel])
            whole.copy_(flat.view(whole.shape))

    def _load(self, slot: Slot) -> None:
        flat = slot.param.tensor.detach().reshape(-1)
        for offset, shard in slot.offsets:
            self.params[offset : offset + shard.numel].copy_(flat[shard.start : shard.stop])

    def shard_of(self, slot: Slot, offset: int, shard: Shard) -> torch.Tensor:
        """What the local optimizer steps: the whole parameter in its shape, or a flat range of it."""
        start = offset - self.own_start
        if shard.numel == slot.param.tensor.numel():
            return _shaped(self.shard, start, slot.param.tensor, keep_strides=slot.home is not None)
        return self.shard[start : start + shard.numel]

    def reduced_gradient_of(self, slot: Slot, offset: int, shard: Shard) -> torch.Tensor:
        """Where the reduction of one owned shard's gradient arrives, shaped like the shard."""
        assert self.reduced is not None
        if shard.numel == slot.param.tensor.numel():
            return _shaped(self.reduced, offset - self.own_start, slot.param.tensor, slot.home is not None)
        return self.reduced[offset - self.own_start : offset - self.own_start + shard.numel]


def _slots(bucket: Bucket, params: Mapping[str, NamedParam]) -> list[Slot]:
    offsets: dict[str, list[tuple[int, Shard]]] = {}
    position = 0
    for shard in bucket.shards:
        offsets.setdefault(shard.param, []).append((position, shard))
        position += shard.numel
    for places in offsets.values():
        places.sort(key=lambda place: place[1].start)
    return [Slot(param=params[name], offsets=places) for name, places in offsets.items()]


def _shaped(buffer: torch.Tensor, offset: int, like: torch.Tensor, keep_strides: bool) -> torch.Tensor:
    """The part of a flat buffer that starts at an offset, in the shape (and the strides) of a tensor."""
    if keep_strides and not like.is_contiguous():
        return buffer.as_strided(like.shape, like.stride(), buffer.storage_offset() + offset)
    return buffer[offset : offset + like.numel()].view(like.shape)


def _owns_storage(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _give_back(memory: torch.Tensor) -> None:
    memory.untyped_storage().resize_(0)


def _obtain(memory: torch.Tensor) -> None:
    storage, nbytes = memory.untyped_storage(), memory.numel() * memory.element_size()
    if storage.nbytes() != nbytes:
        storage.resize_(nbytes)


def _may_move(tensor: torch.Tensor, *, cut: bool) -> bool:
    lives_with_us = getattr(tensor, _HOME, None) == tensor.data_ptr()
    if not (_owns_storage(tensor) or lives_with_us):
        return False
    return tensor.is_contiguous() or (not cut and _is_dense(tensor))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory exactly once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def check_unchanged(name: str, home: torch.Tensor, tensor: torch.Tensor) -> None:
    """A parameter (or its gradient) must still fit the place that was laid out for it."""
    if (tensor.dtype, tensor.shape, tensor.device) != (home.dtype, home.shape, home.device):
        raise OptimizerError(
            f"parameter {name!r} was {_kind(home)} when the optimizer was built and is {_kind(tensor)} now; "
            "convert the model first and build the optimizer afterwards"
        )


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def frozen_shard(shard: Shard, param: NamedParam) -> torch.Tensor:
    """The shard of a parameter that is in no bucket (it is frozen), as a view where there can be one."""
    tensor = param.tensor.detach()
    return tensor if shard.numel == tensor.numel() else tensor.reshape(-1)[shard.start : shard.stop]

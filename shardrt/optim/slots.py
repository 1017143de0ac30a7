"""Where each parameter of a bucket lies in its buffers."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from shardrt.errors import OptimizerError
from shardrt.optim.params import NamedParam
from shardrt.optim.readers import SHOWN
from shardrt.plan import Bucket, Shard

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

    def move_to(self, home: torch.Tensor, *, shows: bool = False) -> None:
        """From now on ``p.data`` is this place; ``shows``: it is other ranks' memory."""
        tensor = self.param.tensor
        tensor.data = home
        if shows:
            setattr(tensor, SHOWN, True)
        else:
            vars(tensor).pop(SHOWN, None)
        setattr(tensor, _HOME, home.data_ptr())
        self.home = home


def slots_of(bucket: Bucket, params: Mapping[str, NamedParam]) -> list[Slot]:
    """The parameters of a bucket, in the order of its buffers."""
    offsets: dict[str, list[tuple[int, Shard]]] = {}
    position = 0
    for shard in bucket.shards:
        offsets.setdefault(shard.param, []).append((position, shard))
        position += shard.numel
    for places in offsets.values():
        places.sort(key=lambda place: place[1].start)
    return [Slot(param=params[name], offsets=places) for name, places in offsets.items()]


def shaped(buffer: torch.Tensor, offset: int, like: torch.Tensor, keep_strides: bool) -> torch.Tensor:
    """The part of a flat buffer that starts at an offset, in the shape (and the strides) of a tensor."""
    if keep_strides and not like.is_contiguous():
        return buffer.as_strided(like.shape, like.stride(), buffer.storage_offset() + offset)
    return buffer[offset : offset + like.numel()].view(like.shape)


def may_move(tensor: torch.Tensor, *, cut: bool) -> bool:
    """Whether a parameter can become a view of a bucket's buffer."""
    lives_with_us = getattr(tensor, _HOME, None) == tensor.data_ptr()
    if not (owns_storage(tensor) or lives_with_us):
        return False
    return tensor.is_contiguous() or (not cut and _is_dense(tensor))


def owns_storage(tensor: torch.Tensor) -> bool:
    """Whether nothing else can be in its memory."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


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

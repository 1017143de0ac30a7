"""Ranges of a whole tensor, put together from the boxes that files hold of it.

Elements are moved as words of their size, never as numbers: every bit pattern survives, and numpy needs to know
nothing about bfloat16. The boxes are numpy arrays over mapped files, so that reading a range touches its pages only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from shardrt.errors import CheckpointError
from shardrt.plan.params import ITEM_SIZES
from shardrt.state.portable import LazyTensor, dtype_called

Words = np.ndarray[Any, Any]
_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}


def word_of(dtype: str) -> str:
    """What numpy calls the words that elements of a dtype are moved as."""
    return _WORDS[ITEM_SIZES[dtype]]


@attrs.frozen(kw_only=True)
class Box:
    """A part of a tensor: where it begins, its sizes, and its elements, opened when they are first wanted."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    open: Callable[[], Words]

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.sizes)


def lazy_boxes(dtype: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> LazyTensor:
    """A whole tensor that is read from its boxes, which must have passed :func:`check_boxes`.

    Example:
        >>> import numpy as np
        >>> from shardrt.interchange.boxes import Box, lazy_boxes
        >>> left = Box(offsets=(0, 0), sizes=(2, 1), open=lambda: np.array([[1], [2]], "u1"))
        >>> right = Box(offsets=(0, 1), sizes=(2, 2), open=lambda: np.array([[3, 4], [5, 6]], "u1"))
        >>> lazy_boxes("uint8", (2, 3), [left, right]).read(1, 5).tolist()
        [3, 4, 2, 5]
    """
    held = sorted((box for box in boxes if box.numel), key=lambda box: box.offsets)

    def read(start: int, stop: int) -> torch.Tensor:
        out = torch.empty(stop - start, dtype=dtype_called(dtype))
        words: Words = out.view(torch.uint8).numpy().view(word_of(dtype))
        at = 0
        for corner, sizes in wanted_boxes(shape, start, stop):
            target = words[at : at + math.prod(sizes)].reshape(sizes)
            at += target.size
            for box in held:
                _copy_common(target, corner, sizes, box)
        return out

    return LazyTensor(dtype=dtype, shape=shape, read=read)


def _copy_common(target: Words, corner: Sequence[int], sizes: Sequence[int], box: Box) -> None:
    begins = [max(a, b) for a, b in zip(corner, box.offsets, strict=True)]
    ends = [min(a + n, b + m) for a, n, b, m in zip(corner, sizes, box.offsets, box.sizes, strict=True)]
    if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
        return
    there = tuple(slice(b - a, e - a) for a, b, e in zip(corner, begins, ends, strict=True))
    here = tuple(slice(b - a, e - a) for a, b, e in zip(box.offsets, begins, ends, strict=True))
    target[there] = box.open()[here]


def wanted_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements ``[start, stop)`` in row-major order, as the fewest boxes in that order: corners and sizes.

    Example:
        >>> from shardrt.interchange.boxes import wanted_boxes
        >>> list(wanted_boxes((3, 4), 2, 12))
        [((0, 2), (1, 2)), ((1, 0), (2, 4))]
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = start // row, stop // row
    if start % row or first == last:
        end = min(stop - first * row, row)
        for corner, sizes in wanted_boxes(shape[1:], start % row, end):
            yield (first, *corner), (1, *sizes)
        first += 1
    if first < last:
        yield (first, *([0] * (len(shape) - 1))), (last - first, *shape[1:])
    if first <= last and stop % row:
        for corner, sizes in wanted_boxes(shape[1:], 0, stop % row):
            yield (last, *corner), (1, *sizes)


def check_boxes(shape: tuple[int, ...], boxes: Sequence[Box], *, where: str) -> None:
    """Refuse boxes that leave their tensor, overlap, or do not cover it."""
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            raise CheckpointError(f"{where}: a chunk at {box.offsets} of {box.sizes} in a tensor of shape {shape}")
        for offset, size, full in zip(box.offsets, box.sizes, shape, strict=True):
            if offset < 0 or size < 0 or offset + size > full:
                raise CheckpointError(
                    f"{where}: the chunk at {box.offsets} of sizes {box.sizes} leaves the tensor of shape {shape}"
                )
    held = sorted((box for box in boxes if box.numel), key=lambda box: box.offsets)
    if (overlap := _overlapping(shape, held)) is not None:
        one, other = overlap
        raise CheckpointError(
            f"{where}: the chunks at {one.offsets} of {one.sizes} and {other.offsets} of {other.sizes} overlap"
        )
    found, needed = sum(box.numel for box in held), math.prod(shape)
    if found != needed:
        raise CheckpointError(f"{where}: its chunks hold {found} elements of {needed}; some are missing")


def _overlapping(shape: tuple[int, ...], held: Sequence[Box]) -> tuple[Box, Box] | None:
    # Cut along the first dim only, as nearly always, neighbours tell; a grid of chunks is compared pair by pair.
    if all(box.sizes[1:] == shape[1:] for box in held):
        pairs: Iterator[tuple[Box, Box]] = itertools.pairwise(held)
    else:
        pairs = itertools.combinations(held, 2)
    for one, other in pairs:
        both = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
        if all(a < b + m and b < a + n for a, n, b, m in both):
            return one, other
    return None

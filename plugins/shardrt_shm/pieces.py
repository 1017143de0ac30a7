"""A buffer that may lie in several pieces of memory, seen as one run of elements."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

from shardrt_shm.arena import Place, process_arena
from shardrt_shm.mapping import move


class Pieces:
    """Flat tensors of one dtype, one behind the other.

    Example:
        >>> import torch
        >>> from shardrt_shm.pieces import Pieces
        >>> pieces = Pieces([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
        >>> [part.tolist() for part in pieces.parts(1, 3)]
        [[2.0], [3.0]]
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [tensor for tensor in tensors if tensor.numel()]
        self._starts = [0, *accumulate(tensor.numel() for tensor in self.tensors)]

    @property
    def numel(self) -> int:
        """Elements of all pieces."""
        return self._starts[-1]

    def place(self) -> Place | None:
        """Where all of it lies in shared memory, without a gap; None where it does not."""
        if not self.tensors:
            return None
        arena = process_arena()
        first = arena.find(self.tensors[0])
        if first is None:
            return None
        end = first.position
        for tensor in self.tensors:
            found = arena.find(tensor)
            if found is None or (found.offset, found.position) != (first.offset, end):
                return None
            end += tensor.nbytes
        return first

    def parts(self, start: int, stop: int) -> list[torch.Tensor]:
        """What there is of the elements ``[start, stop)``."""
        at = bisect_right(self._starts, start) - 1
        found = []
        while start < stop:
            begin, end = self._starts[at : at + 2]
            tensor = self.tensors[at]
            found.append(tensor if start == begin and end <= stop else tensor[start - begin : min(end, stop) - begin])
            start, at = end, at + 1
        return found

    def copy_to(self, target: torch.Tensor, start: int) -> None:
        """Fill a tensor with the elements from ``start`` on."""
        parts = self.parts(start, start + target.numel())
        if len(parts) == 1:
            move(target, parts[0])
        elif parts:
            torch.cat(parts, out=target)

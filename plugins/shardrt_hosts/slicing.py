"""Large reductions in slices, so that the levels work side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

Slice = tuple[list[int], list[list[torch.Tensor]]]
"""Of every rank's run: how many elements, and the pieces that they are in."""


def cut_runs(runs: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int], count: int) -> list[Slice]:
    """Every run in so many parts of nearly the same size; what follows from the sizes is the same on all ranks.

    Example:
        >>> import torch
        >>> from shardrt_hosts.slicing import cut_runs
        >>> runs = [[torch.tensor([1, 2]), torch.tensor([3])], [torch.tensor([4])]]
        >>> for sizes, pieces in cut_runs(runs, [3, 1], 2):
        ...     print(sizes, [[piece.tolist() for piece in run] for run in pieces])
        [1, 0] [[[1]], []]
        [2, 1] [[[2], [3]], [[4]]]
    """
    count = max(count, 1)
    if count == 1:
        return [(list(sizes), [list(run) for run in runs])]
    found = []
    for number in range(count):
        ends = [(size * number // count, size * (number + 1) // count) for size in sizes]
        pieces = [list(_between(run, start, stop)) for run, (start, stop) in zip(runs, ends, strict=True)]
        found.append(([stop - start for start, stop in ends], pieces))
    return found


def _between(run: Sequence[torch.Tensor], start: int, stop: int) -> Iterator[torch.Tensor]:
    at = 0
    for piece in run:
        first, last = max(start - at, 0), min(stop - at, piece.numel())
        if first < last:
            yield piece[first:last]
        at += piece.numel()

"""Large operations in slices, so that the levels work side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

_SLICE_BYTES = 4 * 2**20
"""One slice crosses while another is reduced, or spread, inside: that of the first, or the last, is all that waits."""
Slice = tuple[list[int], list[list[torch.Tensor]]]
"""Of every rank's run: how many elements, and the pieces that they are in."""


def slices_for(nbytes: int) -> int:
    """How many slices an operation on so many bytes goes in.

    Example:
        >>> from shardrt_hosts.slicing import slices_for
        >>> slices_for(0), slices_for(25_000_000)
        (1, 6)
    """
    return max(1, -(-nbytes // _SLICE_BYTES))


def cut_each(runs: Sequence[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """Of every run the first part, the second, and so on; some may be empty.

    Example:
        >>> import torch
        >>> from shardrt_hosts.slicing import cut_each
        >>> [[part.tolist() for part in parts] for parts in cut_each([torch.tensor([1, 2, 3]), torch.tensor([4])], 2)]
        [[[1], []], [[2, 3], [4]]]
    """
    return [
        [
            run[start:stop]
            for run, (start, stop) in zip(runs, _ends([run.numel() for run in runs], one, count), strict=True)
        ]
        for one in range(count)
    ]


def _ends(sizes: Sequence[int], number: int, count: int) -> list[tuple[int, int]]:
    return [(size * number // count, size * (number + 1) // count) for size in sizes]


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
    if count == 1:
        return [(list(sizes), [list(run) for run in runs])]
    found = []
    for number in range(count):
        ends = _ends(sizes, number, count)
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

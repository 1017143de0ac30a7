"""How a run that lies in pieces travels: in chunks that all ranks cut alike.

A large piece is sent from where it is, in chunks; small ones that follow one another are laid side by side and travel
together, since each message costs as much as copying some thousands of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch

from shardrt.comm.scratch import Lease, ScratchPool

_SMALL_ELEMENTS = 32 * 1024
"""Pieces below this travel together with their small neighbours."""


@attrs.frozen(kw_only=True, eq=False)
class Chunk:
    """A part of a run that is one message."""

    start: int
    """Its first element in the run."""
    numel: int
    pieces: Sequence[torch.Tensor]


def side_by_side(chunk: Chunk, pool: ScratchPool) -> tuple[torch.Tensor, list[Lease]]:
    """The piece itself, or a copy of several in scratch, with the lease of it.

    Example:
        >>> import torch
        >>> from shardrt.comm.scratch import ScratchPool
        >>> from shardrt_gloo.chunks import cut_into_chunks, side_by_side
        >>> [chunk] = cut_into_chunks([torch.zeros(2), torch.ones(1)], 10)
        >>> laid, leases = side_by_side(chunk, ScratchPool())
        >>> laid, len(leases)
        (tensor([0., 0., 1.]), 1)
    """
    if len(chunk.pieces) == 1:
        return chunk.pieces[0], []
    lease = pool.take(chunk.numel, chunk.pieces[0].dtype, chunk.pieces[0].device)
    return torch.cat(list(chunk.pieces), out=lease.tensor), [lease]


def cut_into_chunks(pieces: Sequence[torch.Tensor], chunk: int) -> list[Chunk]:
    """The chunks of a run, of at most so many elements each. They follow from the sizes of the pieces alone.

    Example:
        >>> import torch
        >>> from shardrt_gloo.chunks import cut_into_chunks
        >>> pieces = [torch.zeros(3), torch.zeros(4), torch.zeros(100_000)]
        >>> [(chunk.start, chunk.numel, len(chunk.pieces)) for chunk in cut_into_chunks(pieces, 60_000)]
        [(0, 7, 2), (7, 60000, 1), (60007, 40000, 1)]
    """
    return list(_chunks(pieces, max(chunk, 1)))


def even_chunk(runs: Sequence[Sequence[torch.Tensor]], most: int) -> int:
    """The size of chunks, at most so many elements, with which the longest run has no short last one.

    Example:
        >>> import torch
        >>> from shardrt_gloo.chunks import even_chunk
        >>> even_chunk([[torch.zeros(500)], [torch.zeros(300), torch.zeros(310)]], most=600)
        305
    """
    most = max(most, 1)
    longest = max((sum(piece.numel() for piece in run) for run in runs), default=0)
    steps = max(1, -(-longest // most))
    return max(1, -(-longest // steps))


def _chunks(pieces: Sequence[torch.Tensor], chunk: int) -> Iterator[Chunk]:
    start = 0
    together: list[torch.Tensor] = []
    gathered = 0
    for piece in pieces:
        numel = piece.numel()
        if not numel:
            continue
        is_small = numel < _SMALL_ELEMENTS and numel <= chunk
        if together and (not is_small or gathered + numel > chunk):
            yield Chunk(start=start, numel=gathered, pieces=together)
            start += gathered
            together, gathered = [], 0
        if is_small:
            together.append(piece)
            gathered += numel
            continue
        for part in torch.split(piece, chunk):
            yield Chunk(start=start, numel=part.numel(), pieces=(part,))
            start += part.numel()
    if together:
        yield Chunk(start=start, numel=gathered, pieces=together)

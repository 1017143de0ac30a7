"""Checks of buffers that are not in one place, run on every rank: by the backend itself or by the core for it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardrt.testing.conformance.bench import Bench, expect_same

if TYPE_CHECKING:
    import torch

_LARGE = 70_000
"""Elements of a run that a backend may well send in several parts."""


def reduce_scatter_pieces(bench: Bench, *, kind: str, dtype: str, average: bool) -> None:
    """The sum is in the output, and the pieces are what they were: small, large, empty, one or many."""
    from shardrt.comm.pieces import piece_mover

    splits = [size + _LARGE * (size > 0 and kind == "uneven") for size in bench.splits(kind)]
    if not bench.can("reduce_scatter", dtype, splits=splits, average=average):
        return
    mine = bench.mine(sum(splits), dtype)
    pieces = _pieces(mine, splits)
    output = bench.mine(splits[bench.rank], dtype, salt=1)
    piece_mover(bench.comm).reduce_scatter_pieces(pieces, splits, output=output, average=average).wait()
    expected = bench.total(sum(splits), dtype, average=average)[bench.run_of(splits, bench.rank)]
    expect_same(output, expected, f"reduce_scatter of {dtype} in pieces, {kind} runs", exact=not average)
    before = _pieces(bench.values(bench.rank, sum(splits), dtype), splits)
    for index, (piece, was) in enumerate(zip(pieces, before, strict=True)):
        expect_same(piece, was, f"piece {index} after a reduce_scatter")


def all_gather_from(bench: Bench, *, kind: str, dtype: str) -> None:
    """Every run holds what its owner had elsewhere."""
    from shardrt.comm.pieces import piece_mover

    splits = bench.splits(kind)
    if not bench.can("all_gather", dtype, splits=splits):
        return
    own = bench.mine(sum(splits), dtype)[bench.run_of(splits, bench.rank)].clone()
    buffer = bench.mine(sum(splits), dtype, salt=1)
    piece_mover(bench.comm).all_gather_from(own, buffer, splits).wait()
    for owner in range(bench.world_size):
        run = bench.run_of(splits, owner)
        expected = bench.values(owner, sum(splits), dtype)[run]
        expect_same(
            buffer[run], expected, f"all_gather of {dtype} from elsewhere, {kind} runs: the run of rank {owner}"
        )


def _pieces(whole: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
    """Copies apart from one another: for each run an empty one, two of one element, and the rest."""
    found = []
    start = 0
    for size in splits:
        cuts = [0, 0, min(1, size), min(2, size), size]
        found += [whole[start + one : start + other].clone() for one, other in itertools.pairwise(cuts)]
        start += size
    return found

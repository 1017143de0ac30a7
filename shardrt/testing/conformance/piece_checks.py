"""Checks of buffers that are not in one place, run on every rank: by the backend itself or by the core for it."""

from __future__ import annotations

import ctypes
import itertools
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardrt.testing.conformance.bench import Bench, expect, expect_same

if TYPE_CHECKING:
    import torch

_MOMENT_SECONDS = 5.0
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


def pieces_are_let_go(bench: Bench) -> None:
    """Once the wait is over nobody holds the pieces: their memory goes with whoever had them, and no collector need
    come for it."""
    import gc

    from shardrt.comm.pieces import piece_mover

    splits = [_LARGE] * bench.world_size
    if not bench.can("reduce_scatter", "float32", splits=splits):
        return
    pieces, held = _with_owners(bench, splits)
    output = bench.mine(splits[bench.rank], "float32", salt=1)
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        piece_mover(bench.comm).reduce_scatter_pieces(pieces, splits, output=output).wait()
        pieces.clear()
        deadline = time.monotonic() + _MOMENT_SECONDS  # a thread may still be on its way out of the operation
        while any(one() is not None for one in held) and time.monotonic() < deadline:
            time.sleep(0.01)
        kept = sum(one() is not None for one in held)
        expect(not kept, f"{kept} of {len(held)} pieces are still held {_MOMENT_SECONDS:g} s after the wait")
    finally:
        if was_collecting:
            gc.enable()


def _with_owners(
    bench: Bench, splits: Sequence[int]
) -> tuple[list[torch.Tensor], list[weakref.ref[ctypes.Array[ctypes.c_char]]]]:
    """Pieces in memory that tells when nobody has it any more: a small and a large one for each run."""
    import torch

    pieces, held = [], []
    for piece in _pieces(bench.mine(sum(splits), "float32"), splits):
        if piece.numel():
            memory = (ctypes.c_char * piece.nbytes)()
            held.append(weakref.ref(memory))
            pieces.append(torch.frombuffer(memory, dtype=torch.float32).copy_(piece))
            del memory
    return pieces, held


def all_gather_from(bench: Bench, *, kind: str, dtype: str) -> None:
    """Every run holds what its owner had elsewhere."""
    from shardrt.comm.pieces import piece_mover

    splits = bench.splits(kind)
    if not bench.can("all_gather", dtype, splits=splits):
        return
    own = bench.mine(sum(splits), dtype)[bench.run_of(splits, bench.rank)].clone()
    buffer = bench.mine(sum(splits), dtype, salt=1)
    import torch

    # Once into runs side by side, once into runs that lie apart, with the own one given from there.
    apart = [run.clone() for run in torch.split(buffer, list(splits))]
    apart[bench.rank].copy_(own)
    mover = piece_mover(bench.comm)
    works = [
        mover.all_gather_from(own, torch.split(buffer, list(splits))),
        mover.all_gather_from(apart[bench.rank], apart),
    ]
    for work in works:
        work.wait()
    for owner in range(bench.world_size):
        run = bench.run_of(splits, owner)
        expected = bench.values(owner, sum(splits), dtype)[run]
        told = f"all_gather of {dtype}, {kind} runs: the run of rank {owner}"
        expect_same(buffer[run], expected, f"{told}, from elsewhere")
        expect_same(apart[owner], expected, f"{told}, where runs lie apart")


def _pieces(whole: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
    """Copies apart from one another: for each run an empty one, two of one element, and the rest."""
    found = []
    start = 0
    for size in splits:
        cuts = [0, 0, min(1, size), min(2, size), size]
        found += [whole[start + one : start + other].clone() for one, other in itertools.pairwise(cuts)]
        start += size
    return found

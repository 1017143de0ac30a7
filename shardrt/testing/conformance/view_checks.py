"""Checks of runs that are shown where they are, on communicators that offer it. Run on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardrt.comm.viewed import allocate_run
from shardrt.testing.conformance.bench import Bench, expect, expect_same

if TYPE_CHECKING:
    import torch

_LARGE = 70_000
"""Elements that are worth sharing, and fill many pages."""


def view_runs(bench: Bench, *, kind: str, dtype: str) -> None:
    """A view shows every rank's run as it is; what is written to it stays here, and goes when it is renewed."""
    from shardrt.protocols import RunViewer, SharedAllocator

    comm = bench.comm
    if not isinstance(comm, RunViewer) or not isinstance(comm, SharedAllocator):
        return
    splits = [size + _LARGE * (size > 0) for size in bench.splits(kind)]
    own, is_shared = _own_run(bench, splits, dtype)
    elsewhere = bench.mine(splits[bench.rank], dtype)  # no such memory
    # Ranks that have nothing to show cannot keep others from it; whoever has its run elsewhere does.
    views = comm.view_runs([(own, splits), (elsewhere if bench.rank == 0 else own, splits)])
    expect(len(views) == 2, f"view_runs of two gives {len(views)}")
    expect(views[1] is None or splits[0] == 0, "a view of a run that lies in no shared memory")
    view = views[0]
    if view is None:
        could = sum(splits) > 0 and all(comm.exchange("shared runs", is_shared))
        expect(not could, "no view, though all runs lie in shared memory")
        return
    comm.barrier()
    view.complete()
    _expect_shown(bench, view.whole, splits, dtype, salt=0)
    comm.barrier()  # everybody has read
    own.copy_(bench.mine(sum(splits), dtype, salt=1)[bench.run_of(splits, bench.rank)])
    comm.barrier()
    view.complete()
    _expect_shown(bench, view.whole, splits, dtype, salt=1)
    comm.barrier()
    view.whole.zero_()
    comm.barrier()
    before = bench.mine(sum(splits), dtype, salt=1)[bench.run_of(splits, bench.rank)]
    expect_same(own, before, "this rank's run, after everybody wrote to a view of it")
    view.renew()
    view.complete()
    _expect_shown(bench, view.whole, splits, dtype, salt=1)
    comm.barrier()


def _own_run(bench: Bench, splits: Sequence[int], dtype: str) -> tuple[torch.Tensor, bool]:
    """And whether it lies where peers can read it; what is empty lies anywhere."""
    import torch

    run = bench.run_of(splits, bench.rank)
    mine = bench.mine(sum(splits), dtype)[run]
    allocate = getattr(bench.comm, "allocate")  # noqa: B009
    own = allocate_run(allocate, len(mine), getattr(torch, dtype), run.start) if len(mine) else None
    return (mine.clone(), len(mine) == 0) if own is None else (own.copy_(mine), True)


def _expect_shown(bench: Bench, whole: torch.Tensor, splits: Sequence[int], dtype: str, salt: int) -> None:
    for owner in range(bench.world_size):
        run = bench.run_of(splits, owner)
        expected = bench.values(owner, sum(splits), dtype, salt)[run]
        expect_same(whole[run], expected, f"a view of {dtype}: the run of rank {owner}")

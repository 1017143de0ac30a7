"""Checks of waiting, order, time and mistakes, run on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shardrt.comm import Capabilities, Traffic
from shardrt.errors import CommunicationError, HandshakeError, PeerError, ShardrtError
from shardrt.protocols import Communicator
from shardrt.testing.conformance.bench import Bench, expect, expect_same

MISSING_LIMIT = 0.5
"""Seconds a wait may take in the check of a rank that does not come."""
_MARGIN = 12.0
"""Seconds more than that until an error counts as late: machines are busy, and some channels wait for news."""


def wait_twice(bench: Bench) -> None:
    """Waiting again on what is finished returns at once and changes nothing."""
    splits = bench.splits("even")
    count = sum(splits)
    if bench.can("all_reduce", "float32"):
        buffer = bench.mine(count, "float32")
        work = bench.comm.all_reduce(buffer)
        for _ in range(3):
            work.wait()
        expect_same(buffer, bench.total(count, "float32"), "all_reduce waited for three times")
    if bench.can("all_gather", "float32", splits=splits):
        work = bench.comm.all_gather(bench.mine(count, "float32"), splits)
        work.wait()
        work.wait()
    if bench.can("reduce_scatter", "float32", splits=splits):
        work = bench.comm.reduce_scatter(bench.mine(count, "float32"), splits)
        work.wait()
        work.wait()


def several_outstanding(bench: Bench, *, backwards: bool) -> None:
    """Operations issued one after the other and waited for later, in the same order or in the opposite one."""
    if not (bench.can("reduce_scatter", "float32") and bench.can("all_gather", "float32")):
        return
    splits = bench.splits("even")
    count = sum(splits)
    run = bench.run_of(splits, bench.rank)
    reduced = [bench.mine(count, "float32", salt=index) for index in range(6)]
    gathered = [bench.mine(count, "float32", salt=10 + index) for index in range(6)]
    works = []
    for one, other in zip(reduced, gathered, strict=True):
        works.append(bench.comm.reduce_scatter(one, splits))
        works.append(bench.comm.all_gather(other, splits))
    for work in reversed(works) if backwards else works:
        work.wait()
    for index in range(6):
        expected = bench.total(count, "float32", salt=index)[run]
        expect_same(reduced[index][run], expected, f"outstanding reduce_scatter {index}")
        for owner in range(bench.world_size):
            where = bench.run_of(splits, owner)
            brought = bench.values(owner, count, "float32", salt=10 + index)[where]
            expect_same(gathered[index][where], brought, f"outstanding all_gather {index}")


def late_rank(bench: Bench) -> None:
    """A rank that comes late is waited for, in every operation's wait."""
    if not bench.can("all_reduce", "float32"):
        return
    if bench.rank == 0:
        time.sleep(0.4)
    buffer = bench.mine(9, "float32")
    bench.comm.all_reduce(buffer).wait()
    expect_same(buffer, bench.total(9, "float32"), "all_reduce with a late rank")


def different_topics(bench: Bench) -> None:
    """Ranks at different places learn so, all of them."""
    try:
        bench.comm.exchange(f"topic-of-rank-{bench.rank}", 1)
    except HandshakeError as error:
        expect("topic-of-rank-" in str(error), f"the error does not name the topics: {error}")
    else:
        raise AssertionError("exchange took differing topics without an error")


def bad_arguments(bench: Bench) -> None:
    """A mistake on rank 0 alone is refused there at once: the others, who do not call, see nothing of it."""
    import torch

    world = bench.world_size
    flat = torch.zeros(4 * world, device=bench.device_type)
    holes = torch.zeros(8 * world, device=bench.device_type)[::2]
    even = [4] * world
    one_each = [torch.zeros(2, device=bench.device_type) for _ in range(world)]
    comm = bench.comm
    mistakes: dict[str, Callable[[], Any]] = {
        "reduce_scatter of a matrix": lambda: comm.reduce_scatter(flat.view(2, -1), even),
        "reduce_scatter with holes": lambda: comm.reduce_scatter(holes, even),
        "reduce_scatter, splits too short": lambda: comm.reduce_scatter(flat, even[:-1]),
        "reduce_scatter, wrong sum": lambda: comm.reduce_scatter(flat, [*even[:-1], 3]),
        "reduce_scatter, negative": lambda: comm.reduce_scatter(flat[:0], [*([0] * (world - 1)), -1]),
        "reduce_scatter, output too long": lambda: comm.reduce_scatter(flat, even, output=torch.cat([flat, flat])),
        "reduce_scatter, output with holes": lambda: comm.reduce_scatter(flat, even, output=holes[:4]),
        "all_gather of a matrix": lambda: comm.all_gather(flat.view(2, -1), even),
        "all_gather with holes": lambda: comm.all_gather(holes, even),
        "all_gather, too many splits": lambda: comm.all_gather(flat, [*even, 0]),
        "all_gather, wrong sum": lambda: comm.all_gather(flat, [*even[:-1], 5]),
        "all_reduce with holes": lambda: comm.all_reduce(holes),
        "all_reduce, unknown op": lambda: comm.all_reduce(flat, op="median"),  # type: ignore[arg-type]
        "all_reduce, average of a maximum": lambda: comm.all_reduce(flat, op="max", average=True),
        "all_to_all, too few": lambda: comm.all_to_all(one_each[:-1], one_each[:-1]),
        "broadcast from nobody": lambda: comm.broadcast(flat, world),
        "broadcast from below": lambda: comm.broadcast(flat, -1),
        "broadcast with holes": lambda: comm.broadcast(holes, 0),
    }
    if bench.rank == 0:
        for what, call in mistakes.items():
            if not bench.can(what.replace(",", "").split()[0], "float32"):
                continue
            try:
                call()
            except ShardrtError as error:
                expect(what.replace(",", "").split()[0] in str(error), f"{what}: the error does not name it: {error}")
            else:
                raise AssertionError(f"{what} was not refused")
    if bench.can("all_reduce", "float32"):
        buffer = bench.mine(9, "float32")
        comm.all_reduce(buffer).wait()
        expect_same(buffer, bench.total(9, "float32"), "all_reduce after refused mistakes")


def missing_rank(bench: Bench, *, operation: str) -> None:
    """The last rank does not come; the others get an error that names the operation, in time."""
    import torch

    absent = bench.world_size - 1
    splits = [1024] * bench.world_size
    device = bench.device_type
    flat = torch.zeros(sum(splits), device=device)
    blocks = [torch.zeros(8, device=device) for _ in range(bench.world_size)]
    spare = [torch.zeros(8, device=device) for _ in range(bench.world_size)]
    calls: dict[str, Callable[[], Any]] = {
        "reduce_scatter": lambda: bench.comm.reduce_scatter(flat, splits).wait(),
        "all_gather": lambda: bench.comm.all_gather(flat, splits).wait(),
        "all_reduce": lambda: bench.comm.all_reduce(flat).wait(),
        "all_to_all": lambda: bench.comm.all_to_all(spare, blocks).wait(),
        "broadcast": lambda: bench.comm.broadcast(flat, absent).wait(),
        "barrier": lambda: bench.comm.barrier(),
        "exchange": lambda: bench.comm.exchange("roll-call", bench.rank),
    }
    if operation not in ("barrier", "exchange") and not bench.can(operation, "float32"):
        return
    if bench.rank == absent:
        return
    started = time.monotonic()
    try:
        calls[operation]()
    except (CommunicationError, PeerError) as error:
        named = "roll-call" if operation == "exchange" else operation
        expect(named in str(error), f"the error does not name {named}: {error}")
    else:
        raise AssertionError(f"{operation} returned although rank {absent} did not call it")
    seconds = time.monotonic() - started
    expect(seconds < MISSING_LIMIT + _MARGIN, f"{operation} took {seconds:.1f} s to say that a rank is missing")


def traffic(bench: Bench) -> None:
    """What all ranks say they sent is at least what must travel; on one rank nothing does."""
    splits = bench.splits("even")
    count = sum(splits)
    least = count * 4 * (bench.world_size - 1)
    for operation in ("reduce_scatter", "all_gather"):
        if not bench.can(operation, "float32", splits=splits):
            continue
        before = bench.comm.traffic.copy()
        getattr(bench.comm, operation)(bench.mine(count, "float32"), splits).wait()
        moved = bench.comm.traffic - before
        sent = sum(bench.comm.exchange(f"sent-{operation}", moved.sent))
        received = sum(bench.comm.exchange(f"received-{operation}", moved.received))
        expect(sent >= least, f"{operation}: all ranks together count {sent} bytes sent, at least {least} must travel")
        expect(received >= least, f"{operation}: all ranks count {received} bytes received, at least {least} must come")
        expect(bench.world_size > 1 or sent == 0, f"{operation} on one rank counts {sent} bytes sent")


def close_twice(bench: Bench) -> None:
    """Closing again is harmless, and what was computed stays."""
    buffer = bench.mine(5, "float32")
    if bench.can("all_reduce", "float32"):
        bench.comm.all_reduce(buffer).wait()
    bench.comm.close()
    bench.comm.close()
    if bench.can("all_reduce", "float32"):
        expect_same(buffer, bench.total(5, "float32"), "all_reduce before close")


def shape(bench: Bench) -> None:
    """It has everything the protocol names."""
    expect(isinstance(bench.comm, Communicator), f"{bench.comm!r} lacks a part of shardrt.protocols.Communicator")
    expect(isinstance(bench.comm.capabilities, Capabilities), "capabilities is not a shardrt.comm.Capabilities")
    expect(isinstance(bench.comm.traffic, Traffic), "traffic is not a shardrt.comm.Traffic")
    expect(0 <= bench.rank < bench.world_size, f"rank {bench.rank} of {bench.world_size}")

"""Checks of what arrives, run on every rank against answers computed by definition."""

from __future__ import annotations

import hashlib
import random
import time
from typing import TYPE_CHECKING, Any

from shardrt.testing.conformance.bench import Bench, expect, expect_same

if TYPE_CHECKING:
    from shardrt.protocols import ReduceOp


def reduce_scatter(bench: Bench, *, kind: str, dtype: str, average: bool) -> None:
    """This rank's run holds the sum or average."""
    splits = bench.splits(kind)
    if not bench.can("reduce_scatter", dtype, splits=splits, average=average):
        return
    buffer = bench.mine(sum(splits), dtype)
    bench.comm.reduce_scatter(buffer, splits, average=average).wait()
    run = bench.run_of(splits, bench.rank)
    expected = bench.total(sum(splits), dtype, average=average)[run]
    expect_same(buffer[run], expected, f"reduce_scatter of {dtype}, {kind} runs, average={average}", exact=not average)


def reduce_scatter_output(bench: Bench, *, kind: str, dtype: str, average: bool) -> None:
    """With an output the sum is there, and the buffer is what it was."""
    splits = bench.splits(kind)
    if not bench.can("reduce_scatter", dtype, splits=splits, average=average):
        return
    buffer = bench.mine(sum(splits), dtype)
    output = bench.mine(splits[bench.rank], dtype, salt=1)
    bench.comm.reduce_scatter(buffer, splits, output=output, average=average).wait()
    expected = bench.total(sum(splits), dtype, average=average)[bench.run_of(splits, bench.rank)]
    expect_same(output, expected, f"reduce_scatter of {dtype} into an output, {kind} runs", exact=not average)
    expect_same(buffer, bench.values(bench.rank, sum(splits), dtype), "the buffer of a reduce_scatter with an output")


def all_gather(bench: Bench, *, kind: str, dtype: str) -> None:
    """Every run holds what its owner had."""
    splits = bench.splits(kind)
    if not bench.can("all_gather", dtype, splits=splits):
        return
    buffer = bench.mine(sum(splits), dtype)
    bench.comm.all_gather(buffer, splits).wait()
    for owner in range(bench.world_size):
        run = bench.run_of(splits, owner)
        expected = bench.values(owner, sum(splits), dtype)[run]
        expect_same(buffer[run], expected, f"all_gather of {dtype}, {kind} runs: the run of rank {owner}")


def all_reduce(bench: Bench, *, op: ReduceOp, average: bool, dtype: str) -> None:
    """The whole buffer holds the reduction."""
    import torch

    if not bench.can("all_reduce", dtype, average=average):
        return
    buffer = bench.mine(23, dtype)
    bench.comm.all_reduce(buffer, op=op, average=average).wait()
    if op == "sum":
        expected = bench.total(23, dtype, average=average)
    else:
        inputs = torch.stack([bench.values(rank, 23, dtype) for rank in range(bench.world_size)])
        expected = inputs.amax(0) if op == "max" else inputs.amin(0)
    expect_same(buffer, expected, f"all_reduce of {dtype}, op={op}, average={average}", exact=not average)


def all_reduce_same_bits(bench: Bench, *, dtype: str, average: bool) -> None:
    """Rounding is the same everywhere, with numbers whose sum depends on the order."""
    import torch

    if not bench.can("all_reduce", dtype, average=average):
        return
    generator = torch.Generator().manual_seed(bench.rank)
    kind = getattr(torch, dtype)
    spread = 10.0 ** torch.randint(-3, 4, (1001,), generator=generator)
    buffer = (torch.randn(1001, generator=generator) * spread).to(kind).to(bench.device_type)
    bench.comm.all_reduce(buffer, average=average).wait()
    digest = hashlib.sha256(buffer.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
    digests = bench.comm.exchange("bits", digest)
    expect(len(set(digests)) == 1, f"all_reduce of {dtype} left different bits on different ranks: {digests}")


def all_to_all(bench: Bench, *, even: bool, dtype: str) -> None:
    """Every rank gets from every other what was meant for it; sizes differ pairwise, some are zero."""

    def size(sender: int, receiver: int) -> int:
        return 4 if even else (sender * 3 + receiver * 5) % 7

    sizes = [size(bench.rank, receiver) for receiver in range(bench.world_size)]
    if not bench.can("all_to_all", dtype, splits=() if even else (1, 2)):
        return
    sent = [bench.mine(count, dtype, salt=receiver) for receiver, count in enumerate(sizes)]
    received = [bench.mine(size(sender, bench.rank), dtype).zero_() for sender in range(bench.world_size)]
    bench.comm.all_to_all(received, sent).wait()
    for sender, found in enumerate(received):
        expected = bench.values(sender, size(sender, bench.rank), dtype, salt=bench.rank)
        expect_same(found, expected, f"all_to_all of {dtype}: what rank {sender} sent")


def broadcast(bench: Bench, *, dtype: str) -> None:
    """From each source in turn."""
    if not bench.can("broadcast", dtype):
        return
    for source in range(bench.world_size):
        buffer = bench.mine(19, dtype)
        bench.comm.broadcast(buffer, source).wait()
        expect_same(buffer, bench.values(source, 19, dtype), f"broadcast of {dtype} from rank {source}")


def barrier(bench: Bench) -> None:
    """Nobody leaves before the last has come."""
    time.sleep(0.05 * bench.rank)
    entered = time.monotonic()  # one clock for all processes of a host
    bench.comm.barrier()
    left = time.monotonic()
    times = bench.comm.exchange("times", [entered, left])
    last = max(pair[0] for pair in times)
    expect(all(pair[1] >= last for pair in times), f"a rank left the barrier before the last one came: {times}")


def exchange(bench: Bench) -> None:
    """JSON values come through as they are, in rank order."""
    values: list[Any] = [
        None,
        True,
        -3,
        0.1,
        1e-300,
        "",
        'Grüße, 世界 🌍 \n\t"quoted" \\ \x00',
        [],
        {"nested": {"list": [1, [2, [3, {"deep": None}]]]}},
        "x" * 100_000,
    ]
    for index, value in enumerate(values):
        found = bench.comm.exchange(f"value-{index}", {"rank": bench.rank, "value": value})
        expected = [{"rank": rank, "value": value} for rank in range(bench.world_size)]
        expect(found == expected, f"exchange of value {index} came back as {str(found)[:200]}")


def sizes(bench: Bench, *, count: int) -> None:
    """Buffers without elements, with one, and with a million."""
    dtype = "float32"
    if bench.can("all_reduce", dtype):
        buffer = bench.mine(count, dtype)
        bench.comm.all_reduce(buffer).wait()
        expect_same(buffer, bench.total(count, dtype), f"all_reduce of {count} elements")
    if bench.can("broadcast", dtype):
        buffer = bench.mine(count, dtype)
        bench.comm.broadcast(buffer, bench.world_size - 1).wait()
        expect_same(buffer, bench.values(bench.world_size - 1, count, dtype), f"broadcast of {count} elements")
    splits = [count // bench.world_size] * bench.world_size
    splits[-1] += count - sum(splits)
    if bench.can("reduce_scatter", dtype, splits=splits):
        buffer = bench.mine(count, dtype)
        bench.comm.reduce_scatter(buffer, splits).wait()
        run = bench.run_of(splits, bench.rank)
        expect_same(buffer[run], bench.total(count, dtype)[run], f"reduce_scatter of {count} elements")
    if bench.can("all_gather", dtype, splits=splits):
        buffer = bench.mine(count, dtype)
        bench.comm.all_gather(buffer, splits).wait()
        for owner in range(bench.world_size):
            run = bench.run_of(splits, owner)
            expect_same(buffer[run], bench.values(owner, count, dtype)[run], f"all_gather of {count} elements")


def many_small(bench: Bench, *, operations: int) -> None:
    """Results stay right over a long mixed series, each waited for."""
    rng = random.Random(7)  # the same series on every rank
    for step in range(operations):
        count = rng.randrange(1, 9)
        splits = [count] * bench.world_size
        choice = rng.choice(["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
        if not bench.can(choice, "float32"):
            continue
        buffer = bench.mine(sum(splits), "float32", salt=step)
        total = bench.total(sum(splits), "float32", salt=step)
        run = bench.run_of(splits, bench.rank)
        if choice == "all_reduce":
            bench.comm.all_reduce(buffer).wait()
            expect_same(buffer, total, f"operation {step}: all_reduce")
        elif choice == "reduce_scatter":
            bench.comm.reduce_scatter(buffer, splits).wait()
            expect_same(buffer[run], total[run], f"operation {step}: reduce_scatter")
        elif choice == "broadcast":
            bench.comm.broadcast(buffer, step % bench.world_size).wait()
            brought = bench.values(step % bench.world_size, sum(splits), "float32", salt=step)
            expect_same(buffer, brought, f"operation {step}: broadcast")
        else:
            bench.comm.all_gather(buffer, splits).wait()
            for owner in range(bench.world_size):
                where = bench.run_of(splits, owner)
                brought = bench.values(owner, sum(splits), "float32", salt=step)
                expect_same(buffer[where], brought[where], f"operation {step}: all_gather")

"""Every fallback against the definition of its operation, on a backend that refuses whatever it does not declare."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardrt.comm import Capabilities, Negotiated, negotiate
from shardrt.comm.scratch import ScratchPool
from shardrt.errors import CapabilityError
from shardrt.protocols import Communicator
from tests.doubles.cases import CASES, DTYPES, EVEN, all_splits, everything, only, own_runs, total, values
from tests.doubles.threads import ThreadCommunicator, UndeclaredUse, run_threads


def check_everything(comm: Communicator, dtype: str) -> None:
    """Every operation, by definition."""
    world_size, rank = comm.world_size, comm.rank
    exact = dtype != "int64"
    for splits in all_splits(world_size):
        count = sum(splits)
        run = slice(sum(splits[:rank]), sum(splits[: rank + 1]))
        summed = total(world_size, count, dtype)[run]
        for average in (False, True) if exact else (False,):
            expected = summed / world_size if average else summed
            buffer = values(rank, count, dtype)
            comm.reduce_scatter(buffer, splits, average=average).wait()
            torch.testing.assert_close(buffer[run], expected)
            buffer, output = values(rank, count, dtype), torch.empty_like(expected)
            comm.reduce_scatter(buffer, splits, output=output, average=average).wait()
            torch.testing.assert_close(output, expected)
            assert torch.equal(buffer, values(rank, count, dtype)), "with an output the buffer stays as it was"
        buffer = values(rank, count, dtype)
        comm.all_gather(buffer, splits).wait()
        gathered = [values(owner, count, dtype).split(splits)[owner] for owner in range(world_size)]
        assert torch.equal(buffer, torch.cat(gathered))
        for source in range(world_size):
            buffer = values(rank, count, dtype)
            comm.broadcast(buffer, source).wait()
            assert torch.equal(buffer, values(source, count, dtype))
    check_all_reduce(comm, dtype)
    check_all_to_all(comm, dtype)


def check_all_reduce(comm: Communicator, dtype: str) -> None:
    for count, (op, average) in itertools.product(
        (0, 1, 11), (("sum", False), ("sum", True), ("max", False), ("min", False))
    ):
        if (average and dtype == "int64") or (op != "sum" and dtype.startswith("complex")):
            continue
        parts = torch.stack([values(rank, count, dtype) for rank in range(comm.world_size)])
        expected = total(comm.world_size, count, dtype) if op == "sum" else getattr(parts, f"a{op}")(0)
        buffer = values(comm.rank, count, dtype)
        comm.all_reduce(buffer, op=op, average=average).wait()
        torch.testing.assert_close(buffer, expected / comm.world_size if average else expected)


def check_all_to_all(comm: Communicator, dtype: str) -> None:
    def size(sender: int, receiver: int) -> int:
        return (sender * 3 + receiver * 5) % 7

    world, rank = range(comm.world_size), comm.rank
    sent = [values(rank, size(rank, peer), dtype, salt=peer) for peer in world]
    received = [torch.zeros_like(values(peer, size(peer, rank), dtype)) for peer in world]
    comm.all_to_all(received, sent).wait()
    for peer in world:
        assert torch.equal(received[peer], values(peer, size(peer, rank), dtype, salt=rank))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_every_operation_follows_its_definition(case: str, world_size: int) -> None:
    """Whatever a backend lacks, what negotiation returns does everything, and never asks for the undeclared."""

    def on_rank(comm: ThreadCommunicator) -> None:
        negotiated = negotiate(comm, dtypes=DTYPES)
        for dtype in DTYPES:
            check_everything(negotiated, dtype)

    run_threads(world_size, CASES[case], on_rank)


@pytest.mark.parametrize("case", ["even everything", "ascend", "habana"])
def test_more_ranks(case: str) -> None:
    """Five, which Ascend's single-tensor collectives refuse as well."""
    run_threads(5, CASES[case], lambda comm: check_everything(negotiate(comm, dtypes=["bfloat16"]), "bfloat16"))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "float8_e4m3fn", "float16", "complex128"])
@pytest.mark.parametrize("case", ["float32 words", "float32 words, even", "ascend", "habana", "nccl"])
def test_what_is_only_moved_needs_no_reduction(case: str, dtype: str) -> None:
    """Odd numbers of narrow elements travel in wide words, and reductions of them are refused by name."""

    def on_rank(comm: ThreadCommunicator) -> None:
        negotiated = negotiate(comm, dtypes=["float32"], moved=[dtype])
        source = values(comm.rank, 13, "float32").to(getattr(torch, dtype))
        buffer = source.clone()
        negotiated.all_gather(buffer, [3, 5, 5]).wait()
        whole = [values(rank, 13, "float32").to(getattr(torch, dtype)) for rank in range(3)]
        expected = torch.cat([part.view(torch.uint8) for part in own_runs(whole, [3, 5, 5])])
        assert torch.equal(buffer.view(torch.uint8), expected)
        buffer = source.clone()
        negotiated.broadcast(buffer[1:8], 2).wait()
        assert torch.equal(buffer[1:8].view(torch.uint8), whole[2][1:8].view(torch.uint8))
        assert torch.equal(buffer[8:].view(torch.uint8), source[8:].view(torch.uint8))
        with pytest.raises(CapabilityError, match=f"reduce_scatter of {dtype} was not negotiated.*only moved"):
            negotiated.reduce_scatter(source, [3, 5, 5])
        with pytest.raises(CapabilityError, match=f"all_reduce of {dtype} was not negotiated.*only moved"):
            negotiated.all_reduce(source)

    run_threads(3, CASES[case], on_rank)


def test_bit_patterns_arrive_as_they_left() -> None:
    """Not-a-numbers with payloads and negative zeros survive a trip as something else."""
    bits = torch.tensor([0x7FC12345, -0x80000000, 0x7F800001, -1, 0x00000001, 0], dtype=torch.int32)

    def on_rank(comm: ThreadCommunicator) -> None:
        negotiated = negotiate(comm, dtypes=["float32", "int64"])
        for carried in (bits.view(torch.float32), bits.view(torch.int64)):
            buffer = carried.clone() if comm.rank == 0 else torch.zeros_like(carried)
            negotiated.all_gather(buffer, [carried.numel(), 0, 0]).wait()
            assert torch.equal(buffer.view(torch.int32), bits)

    run_threads(3, CASES["ascend"], on_rank)


@pytest.mark.parametrize("case", ["even runs, no average", "float32 words", "all_to_all alone", "ascend", "habana"])
@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_outstanding_operations_do_not_share_scratch(case: str, order: str) -> None:
    """Many under way at once, of many sizes, finished in either order and waited for twice."""

    def on_rank(comm: ThreadCommunicator) -> None:
        negotiated = negotiate(comm, dtypes=["float64", "float32"])
        for step in range(2):
            issued: list[tuple[Any, Any, Any]] = []
            for index in range(8):
                splits = [1 + index, 2 * index, 5]
                count, dtype = sum(splits), ("float32", "float64")[index % 2]
                run = slice(sum(splits[: comm.rank]), sum(splits[: comm.rank + 1]))
                salt = step * 100 + index
                reduced, gathered = values(comm.rank, count, dtype, salt), values(comm.rank, count, dtype, salt)
                work = negotiated.reduce_scatter(reduced, splits, average=True)
                issued.append((work, reduced[run], (total(3, count, dtype, salt) / 3)[run]))
                everyone = torch.cat(own_runs([values(rank, count, dtype, salt) for rank in range(3)], splits))
                issued.append((negotiated.all_gather(gathered, splits), gathered, everyone))
            for work, _, _ in issued if order == "forwards" else reversed(issued):
                work.wait()
            for work, found, expected in issued:
                work.wait()
                torch.testing.assert_close(found, expected)

    run_threads(3, CASES[case], on_rank)


@pytest.mark.parametrize("case", ["even runs, no average", "float32 words", "float32 words, even", "ascend", "habana"])
def test_steps_after_the_first_allocate_nothing(case: str) -> None:
    """Scratch is kept: a step that repeats the sizes of the last one finds what it needs."""

    def on_rank(comm: ThreadCommunicator) -> None:
        negotiated = negotiate(comm, dtypes=["float32", "bfloat16"])
        assert isinstance(negotiated, Negotiated)

        def step() -> None:
            for dtype, sizes in itertools.product(("float32", "bfloat16"), ([10, 3, 7], [100, 1, 0], [5, 50, 5])):
                buffers = [values(comm.rank, sum(sizes), dtype) for _ in range(2)]
                works = [negotiated.reduce_scatter(buffers[0], sizes, average=True)]
                works.append(negotiated.all_gather(buffers[1], sizes))
                for work in works:
                    work.wait()
                negotiated.all_reduce(buffers[0]).wait()

        step()
        after_first = negotiated.scratch.allocations
        assert after_first > 0
        for _ in range(3):
            step()
        assert negotiated.scratch.allocations == after_first

    run_threads(3, CASES[case], on_rank)


def test_even_runs_go_native_without_a_copy() -> None:
    """A backend without uneven runs gets the caller's own buffer where the runs are even."""

    def on_rank(comm: ThreadCommunicator) -> None:
        negotiated = negotiate(comm, dtypes=["float32", "complex64"])
        assert isinstance(negotiated, Negotiated)
        for dtype in ("float32", "complex64"):
            buffer = values(comm.rank, 6, dtype)
            negotiated.reduce_scatter(buffer, [3, 3], average=True).wait()
            negotiated.all_gather(buffer, [3, 3]).wait()
            assert comm.calls[-2:] == [("reduce_scatter", buffer.data_ptr()), ("all_gather", buffer.data_ptr())]
        assert negotiated.scratch.allocations == 0
        output = torch.empty(3)
        negotiated.reduce_scatter(buffer.real.contiguous(), [3, 3], output=output).wait()
        assert negotiated.scratch.allocations == 0

    run_threads(2, everything(only("float32", uneven=False)), on_rank)


def test_exchange_adds_in_rank_order() -> None:
    """Floating point sums depend on the order; this one is 0, 1, 2... on every rank, bit for bit."""
    parts = [torch.tensor([1e8, 1.0, -1e8]), torch.tensor([1.0, 1e8, 3.0]), torch.tensor([-1e8, -1e8, 1e8])]
    expected = (parts[0] + parts[1]) + parts[2]
    assert not torch.equal(expected, parts[0] + (parts[1] + parts[2]))

    def on_rank(comm: ThreadCommunicator) -> None:
        buffer = parts[comm.rank].clone()
        negotiate(comm, dtypes=["float32"]).reduce_scatter(buffer, [1, 1, 1]).wait()
        assert torch.equal(buffer[comm.rank], expected[comm.rank])

    run_threads(3, Capabilities(reduce_scatter=None), on_rank)


def test_the_double_itself_refuses_what_is_not_declared() -> None:
    """A double that takes everything would prove nothing."""

    def on_rank(comm: ThreadCommunicator) -> None:
        with pytest.raises(UndeclaredUse, match="uneven runs"):
            comm.reduce_scatter(torch.zeros(3), [1, 2])
        with pytest.raises(UndeclaredUse, match="average"):
            comm.all_reduce(torch.zeros(2), average=True)
        with pytest.raises(UndeclaredUse, match="all_to_all of float32"):
            comm.all_to_all([torch.zeros(1)] * 2, [torch.zeros(1)] * 2)
        with pytest.raises(UndeclaredUse, match="broadcast of float64"):
            comm.broadcast(torch.zeros(1, dtype=torch.float64), 0)

    able = Capabilities(average=False, reduce_scatter=EVEN, all_to_all=None, broadcast=only("float32"))
    run_threads(2, able, on_rank)


def test_scratch_holds_as_many_buffers_as_were_out_at_once() -> None:
    """Growing sizes replace what has become too small; nothing is lent twice."""
    pool, cpu = ScratchPool(), torch.device("cpu")
    kept = []
    for size in (1, 10, 100, 1000):
        lease = pool.take(size, torch.float32, cpu)
        lease.release()
        kept.append(lease.tensor.data_ptr())
    one, other = pool.take(1000, torch.float32, cpu), pool.take(5, torch.float32, cpu)
    assert one.tensor.data_ptr() == kept[-1] != other.tensor.data_ptr()
    assert pool.allocations == 5, "the smaller ones were kept although nothing had been out beside them"
    assert pool.take(1, torch.int32, cpu).tensor.dtype == torch.int32


@given(data=st.data(), world_size=st.integers(1, 4), case=st.sampled_from(sorted(CASES)), dtype=st.sampled_from(DTYPES))
def test_any_splits(data: st.DataObject, world_size: int, case: str, dtype: str) -> None:
    """Reduce and gather over whatever runs there may be, as views that start anywhere in a larger buffer."""
    splits = data.draw(st.lists(st.integers(0, 9), min_size=world_size, max_size=world_size))
    offset = data.draw(st.integers(0, 3))
    count = sum(splits)

    def on_rank(comm: ThreadCommunicator) -> None:
        negotiated = negotiate(comm, dtypes=[dtype])
        run = slice(sum(splits[: comm.rank]), sum(splits[: comm.rank + 1]))
        whole = values(comm.rank, count + offset, dtype)
        buffer = whole[offset:]
        buffer.copy_(values(comm.rank, count, dtype))
        negotiated.reduce_scatter(buffer, splits).wait()
        assert torch.equal(buffer[run], total(world_size, count, dtype)[run])
        negotiated.all_gather(buffer, splits).wait()
        assert torch.equal(buffer, total(world_size, count, dtype))
        assert torch.equal(whole[:offset], values(comm.rank, count + offset, dtype)[:offset])

    run_threads(world_size, CASES[case], on_rank)

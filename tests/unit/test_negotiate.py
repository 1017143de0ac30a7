"""Negotiation: what comes back, what it says of itself, and what it refuses, before anything moves."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from shardrt.comm import Capabilities, Negotiated, Traffic, negotiate
from shardrt.errors import CapabilityError, ConfigError
from tests.doubles.cases import CASES, DTYPES, EVEN, everything, only
from tests.doubles.threads import ThreadCommunicator, run_threads


def test_what_is_native_is_returned_unchanged() -> None:
    """No wrapper stands on the step path of a backend that can do it all."""

    def on_rank(comm: ThreadCommunicator) -> None:
        assert negotiate(comm, dtypes=DTYPES) is comm

    run_threads(2, Capabilities(), on_rank)
    run_threads(1, Capabilities(reduce_scatter=EVEN, all_gather=EVEN, all_to_all=EVEN), on_rank)
    enough = everything(only(*DTYPES))
    run_threads(2, enough, on_rank)


def backend(capabilities: Capabilities, world_size: int = 2) -> Any:
    """Enough of a communicator to negotiate with."""
    return SimpleNamespace(name="mine", rank=0, world_size=world_size, capabilities=capabilities, traffic=Traffic())


def test_fallbacks_are_told_a_line_each() -> None:
    negotiated = negotiate(backend(CASES["ascend"], 3), dtypes=["float32", "bfloat16"])
    assert isinstance(negotiated, Negotiated)
    assert negotiated.fallbacks == (
        "average: sum, then divide",
        "reduce_scatter of float32, bfloat16: all_to_all of the runs, which their owners add in rank order",
        "all_gather of float32, bfloat16: all_to_all of the own run to everyone",
        "all_to_all of bfloat16: the same bytes seen as float32, staged in scratch",
    )
    doubling = negotiate(backend(CASES["no reduce_scatter nor all_to_all"]), dtypes=["float32"])
    assert any("moves up to twice the bytes" in line for line in doubling.fallbacks)
    assert all("\n" not in line for line in (*negotiated.fallbacks, *doubling.fallbacks))


def test_negotiated_declares_what_it_now_can() -> None:
    negotiated = negotiate(backend(CASES["ascend"], 3), dtypes=["float32"], moved=["bool"])
    able = negotiated.capabilities
    assert able.average and able.needs_streams
    assert able.reduce_scatter == only("float32")
    assert able.all_gather == only("float32", "bool")


@pytest.mark.parametrize(
    ("capabilities", "dtype", "operation"),
    [
        (everything(only("int64")), "float32", "reduce_scatter"),
        (Capabilities(reduce_scatter=None, all_to_all=None, all_reduce=None), "float32", "reduce_scatter"),
        (everything(only("uint8")), "float8_e4m3fn", "reduce_scatter"),
        (Capabilities(all_reduce=None, all_to_all=None), "float32", "all_reduce"),
        (Capabilities(all_gather=None, all_to_all=None, broadcast=None), "float32", "all_gather"),
    ],
)
def test_what_nothing_replaces_is_refused_when_negotiating(
    capabilities: Capabilities, dtype: str, operation: str
) -> None:
    """The refusal names backend, operation, dtype, world size, what there is and what to do."""
    with pytest.raises(CapabilityError) as refusal:
        negotiate(backend(capabilities), dtypes=[dtype])
    text = str(refusal.value)
    assert text.startswith(f"backend 'mine' cannot {operation} {dtype} with 2 ranks, and no fallback can: its ")
    assert "; fix: " in text


def test_refusal_says_what_the_backend_takes() -> None:
    support = attrs.evolve(only("int64", "int16"), world_sizes_refused=frozenset({2, 3}))
    able = Capabilities(reduce_scatter=support, all_to_all=None, all_reduce=only("int64"))
    with pytest.raises(CapabilityError) as refusal:
        negotiate(backend(able), dtypes=["float32"])
    assert (
        "its reduce_scatter takes int16, int64 but not 2, 3 ranks; its all_to_all does not exist; "
        "its all_reduce takes int64;" in str(refusal.value)
    )


def test_a_dtype_that_was_not_negotiated_is_refused_by_name() -> None:
    negotiated = negotiate(backend(CASES["even runs"]), dtypes=["float32"])
    calls = (
        lambda buffer: negotiated.reduce_scatter(buffer, [2, 2]),
        lambda buffer: negotiated.all_gather(buffer, [2, 2]),
        lambda buffer: negotiated.all_reduce(buffer),
        lambda buffer: negotiated.broadcast(buffer, 0),
        lambda buffer: negotiated.all_to_all([buffer, buffer], [buffer, buffer]),
    )
    for call in calls:
        with pytest.raises(
            CapabilityError, match="of float64 was not negotiated with backend 'mine'; negotiated: float32"
        ):
            call(torch.zeros(4, dtype=torch.float64))


def test_mistakes_are_refused_before_anything_moves() -> None:
    negotiated = negotiate(backend(CASES["even runs"]), dtypes=["float32", "complex64", "int64"])
    mistakes = (
        lambda: negotiated.reduce_scatter(torch.zeros(4), [2, 1]),
        lambda: negotiated.reduce_scatter(torch.zeros(3), [2, 1], output=torch.zeros(3)),
        lambda: negotiated.all_gather(torch.zeros(4), [4]),
        lambda: negotiated.all_reduce(torch.zeros(4), op="max", average=True),
        lambda: negotiated.all_reduce(torch.zeros(4, dtype=torch.complex64), op="max"),
        lambda: negotiated.all_reduce(torch.zeros(4, dtype=torch.int64), average=True),
        lambda: negotiated.broadcast(torch.zeros(4), 2),
        lambda: negotiated.all_to_all([torch.zeros(1)], [torch.zeros(1)]),
    )
    for mistake in mistakes:
        with pytest.raises(ConfigError):
            mistake()
    with pytest.raises(ConfigError, match="unknown dtype 'float33'"):
        negotiate(backend(Capabilities()), dtypes=["float33"])


def test_a_failed_operation_raises_again_and_keeps_its_scratch() -> None:
    """Something may still be writing into the scratch of an operation that failed: it is not lent again."""

    class Broken:
        def wait(self) -> None:
            raise RuntimeError("the wire broke")

    inner = backend(CASES["even runs"])
    inner.all_gather = lambda buffer, splits: Broken()
    negotiated = negotiate(inner, dtypes=["float32"])
    assert isinstance(negotiated, Negotiated)
    work = negotiated.all_gather(torch.zeros(3), [1, 2])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the wire broke"):
            work.wait()
    second = negotiated.all_gather(torch.zeros(3), [1, 2])
    assert negotiated.scratch.allocations == 2
    with contextlib.suppress(RuntimeError):
        second.wait()

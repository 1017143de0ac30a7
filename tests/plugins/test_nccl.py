"""The ``nccl`` backend: conformance on a strict double, since no GPU is at hand, and refusals where it cannot run."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import shardrt_nccl
import torch
import torch.distributed as dist

from shardrt.comm import negotiate, require_available
from shardrt.comm.control import LocalControl
from shardrt.errors import BackendUnavailableError, CapabilityError, CommunicationError, ConfigError
from shardrt.protocols import Availability, Communicator, Group
from shardrt.testing import BackendConformance, RankPool
from tests.doubles.strict import DoubleRefusal, NcclDouble


class TestNcclOnItsDouble(BackendConformance):
    """Through the plugin's own factory, directly and negotiated."""

    name = "nccl (double)"

    @classmethod
    def make(cls, group: Group) -> Communicator:
        return shardrt_nccl.make(group, ops=NcclDouble(watchdog=group.timeout))


def expect_refusal(why: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except DoubleRefusal as refusal:
        assert why in str(refusal), f"refused, but for another reason: {refusal}"
    else:
        raise AssertionError(f"the double took what the real one does not: {why}")


def refusals_of_nccl() -> None:
    """On every rank: what the double must not take."""
    double, rank, size = NcclDouble(), dist.get_rank(), dist.get_world_size()
    flat = torch.zeros(3 * size)
    run = flat[3 * rank : 3 * rank + 3]
    expect_refusal("even runs", lambda: double.reduce_scatter_single(torch.zeros(2), flat))
    expect_refusal("even runs", lambda: double.all_gather_single(flat, torch.zeros(2)))
    expect_refusal("own run", lambda: double.reduce_scatter_single(flat[1:4], flat))
    expect_refusal("own run", lambda: double.all_gather_single(flat, flat[1:4]))
    for dtype in (torch.int16, torch.complex64, torch.bool, torch.float8_e4m3fn):
        expect_refusal("does not take", lambda dtype=dtype: double.all_reduce(torch.zeros(2).to(dtype)))
        expect_refusal("does not take", lambda dtype=dtype: double.reduce_scatter_single(run.to(dtype), flat.to(dtype)))
    expect_refusal("does not take", lambda: double.broadcast(torch.zeros(2, dtype=torch.int16), group_src=0))
    expect_refusal("one dtype", lambda: double.all_gather_single(flat, torch.zeros(3, dtype=torch.int32)))
    expect_refusal("contiguous", lambda: double.all_reduce(torch.zeros(4)[::2]))
    premul = dist._make_nccl_premul_sum(2.0)
    expect_refusal("ReduceOp", lambda: double.all_reduce(flat, op=premul))
    expect_refusal("in place", lambda: double.all_to_all([flat] * size, [flat] * size))
    expect_refusal(f"lists of {size}", lambda: double.all_to_all([flat], [torch.zeros(1)]))
    assert double.calls == [], "a refusal came after something had moved"


def native_calls() -> None:
    """On every rank: even runs and averages need nothing but one call each."""
    double = NcclDouble()
    rank, size = dist.get_rank(), dist.get_world_size()
    group = Group(
        rank=rank,
        world_size=size,
        device_type="cpu",
        timeout=20.0,
        control=LocalControl(),
        process_group=dist.group.WORLD,
    )
    comm = negotiate(shardrt_nccl.make(group, ops=double), dtypes=["float32", "int16"], moved=["bool"])
    buffer = torch.full((4 * size,), float(rank))
    comm.reduce_scatter(buffer, [4] * size, average=True).wait()
    comm.all_gather(buffer, [4] * size).wait()
    assert double.calls == ["reduce_scatter_single", "all_gather_single"]
    assert torch.equal(buffer, torch.full((4 * size,), (size - 1) / 2))
    share = 16 * (size - 1)
    assert (comm.traffic.sent, comm.traffic.received) == (2 * share, 2 * share)
    # NCCL has no int16 at all: the sum is made of bytes that are exchanged and added here.
    small = torch.arange(2 * size, dtype=torch.int16)
    comm.all_reduce(small).wait()
    assert torch.equal(small, torch.arange(2 * size, dtype=torch.int16) * size)


def test_the_double_refuses(ranks: RankPool) -> None:
    for size in (2, 3):
        ranks.run(refusals_of_nccl, ranks=size, init="gloo")


def test_even_runs_and_averages_are_native(ranks: RankPool) -> None:
    ranks.run(native_calls, ranks=3, init="gloo")


def alone() -> Group:
    return Group(rank=0, world_size=1, device_type="cpu", timeout=5.0, control=LocalControl())


def test_one_rank_needs_no_process_group() -> None:
    comm = shardrt_nccl.make(alone())
    buffer, output = torch.arange(3.0), torch.zeros(3)
    comm.reduce_scatter(buffer, [3], output=output, average=True).wait()
    comm.all_gather(buffer, [3]).wait()
    comm.all_reduce(buffer, op="max").wait()
    comm.broadcast(buffer, 0).wait()
    received = [torch.zeros(3)]
    comm.all_to_all(received, [buffer]).wait()
    assert torch.equal(output, torch.arange(3.0)) and torch.equal(received[0], buffer)
    assert comm.traffic.sent == 0 and comm.exchange("topic", 1) == [1]


def test_what_is_not_declared_is_refused_by_the_communicator() -> None:
    comm = shardrt_nccl.make(alone())
    with pytest.raises(CapabilityError, match="backend 'nccl' does not declare all_reduce of int16 with 1 ranks"):
        comm.all_reduce(torch.zeros(2, dtype=torch.int16))
    with pytest.raises(ConfigError, match="needs a process group for 2 ranks"):
        shardrt_nccl.make(Group(rank=0, world_size=2, device_type="cuda", timeout=5.0, control=LocalControl()))


def test_failures_name_operation_rank_size_and_timeout() -> None:
    class Failing(NcclDouble):
        def all_reduce(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("NCCL error 6")

    group = Group(rank=1, world_size=4, device_type="cuda", timeout=7.5, control=LocalControl(), process_group=object())
    with pytest.raises(CommunicationError) as failure:
        shardrt_nccl.make(group, ops=Failing()).all_reduce(torch.zeros(2))
    assert str(failure.value).startswith(
        "all_reduce failed (rank 1 of 4, backend 'nccl', timeout 7.5 s): NCCL error 6; "
    )


def test_the_record() -> None:
    (record,) = shardrt_nccl.shardrt_backends()
    assert (record.key, record.process_group, record.priority) == (("cuda", "nccl"), "nccl", 100)


def test_a_cpu_build_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.13.0+cpu")
    (record,) = shardrt_nccl.shardrt_backends()
    with pytest.raises(BackendUnavailableError) as refusal:
        require_available(record)
    assert str(refusal.value) == (
        "backend 'nccl' (device cuda) is unavailable: this torch build (2.13.0+cpu) has no NCCL; "
        "fix: install a CUDA (or ROCm) build of torch, or choose backend='gloo' for the CPU"
    )


@pytest.mark.parametrize(
    ("has_nccl", "has_gpu", "says"),
    [
        (False, False, "this torch build (2.13.0) has no NCCL"),
        (True, False, "torch has NCCL but sees no GPU"),
        (True, True, "2 GPU(s)"),
    ],
)
def test_another_build_is_asked(monkeypatch: pytest.MonkeyPatch, has_nccl: bool, has_gpu: bool, says: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.13.0")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    answer = shardrt_nccl.probe()
    assert (answer.ok, answer.reason) == (has_gpu, says)
    assert bool(answer.fix) != answer.ok


def test_other_platforms_and_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.13.0")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert shardrt_nccl.probe() == Availability.no(
        "NCCL runs on Linux only, this is darwin", fix="choose backend='gloo'"
    )

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert shardrt_nccl.probe().reason == "torch is not installed"


def test_listing_and_probing_a_cpu_build_leave_torch_unimported() -> None:
    code = (
        "import importlib.metadata, sys; importlib.metadata.version = lambda _: '2.13.0+cpu'\n"
        "import shardrt_nccl\n"
        "answers = [record.probe() for record in shardrt_nccl.shardrt_backends()]\n"
        "assert [answer.ok for answer in answers] == [False]\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

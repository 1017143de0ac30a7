"""The two ``hccl`` backends: conformance on strict doubles, probing without side effects, loading that cannot exit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardrt_hccl
import torch
import torch.distributed as dist

from shardrt.comm import Negotiated, negotiate, require_available
from shardrt.comm.control import LocalControl
from shardrt.errors import BackendUnavailableError
from shardrt.protocols import Communicator, Group
from shardrt.testing import BackendConformance, RankPool
from tests.doubles.strict import AscendDouble, HabanaDouble, StrictDouble
from tests.plugins.test_nccl import expect_refusal

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class TestAscendOnItsDouble(BackendConformance):
    """World size 3 is one that Ascend's single-tensor collectives refuse: there everything goes by exchange."""

    name = "hccl on npu (double)"

    @classmethod
    def make(cls, group: Group) -> Communicator:
        return shardrt_hccl.make_ascend(group, ops=AscendDouble(watchdog=group.timeout))


class TestHabanaOnItsDouble(BackendConformance):
    """Its exchange packs, since lists must be even there."""

    name = "hccl on hpu (double)"

    @classmethod
    def make(cls, group: Group) -> Communicator:
        return shardrt_hccl.make_habana(group, ops=HabanaDouble(watchdog=group.timeout))


def refusals_of_ascend() -> None:
    double, size = AscendDouble(), dist.get_world_size()
    flat, run = torch.zeros(2 * size), torch.zeros(2)
    assert not hasattr(double, "reduce_scatter_single"), "torch_npu documents the older names"
    if size == 3:
        expect_refusal("world size of 3", lambda: double.reduce_scatter_tensor(run, flat))
        expect_refusal("world size of 3", lambda: double.all_gather_into_tensor(flat, run))
    else:
        expect_refusal("even runs", lambda: double.reduce_scatter_tensor(torch.zeros(1), flat))
        expect_refusal("ReduceOp", lambda: double.reduce_scatter_tensor(run, flat, op=dist.ReduceOp.AVG))
        for dtype in (torch.float64, torch.int64, torch.uint8):
            expect_refusal(
                "does not take", lambda dtype=dtype: double.reduce_scatter_tensor(run.to(dtype), flat.to(dtype))
            )
            expect_refusal(
                "does not take", lambda dtype=dtype: double.all_gather_into_tensor(flat.to(dtype), run.to(dtype))
            )
    for op in (dist.ReduceOp.AVG, dist._make_nccl_premul_sum(2.0)):
        expect_refusal("ReduceOp", lambda op=op: double.all_reduce(flat, op=op))
    for dtype in (torch.float64, torch.bool, torch.int16):
        expect_refusal("does not take", lambda dtype=dtype: double.all_reduce(flat.to(dtype)))
    for dtype in (torch.bfloat16, torch.int32, torch.uint8):
        pieces = [torch.zeros(1, dtype=dtype)] * size
        expect_refusal("does not take", lambda pieces=pieces: double.all_to_all(pieces, pieces))
    expect_refusal("does not take", lambda: double.broadcast(flat.to(torch.complex64), group_src=0))
    expect_refusal("contiguous", lambda: double.all_reduce(flat[::2]))
    assert double.calls == []


def refusals_of_habana() -> None:
    double, size = HabanaDouble(), dist.get_world_size()
    flat, run = torch.zeros(2 * size), torch.zeros(2)
    expect_refusal("ReduceOp", lambda: double.all_reduce(flat, op=dist.ReduceOp.AVG))
    for dtype in (torch.float64, torch.int32, torch.int64, torch.uint8):
        expect_refusal("does not take", lambda dtype=dtype: double.all_reduce(flat.to(dtype)))
    for dtype in (torch.float64, torch.int64, torch.uint8, torch.bool):
        expect_refusal("does not take", lambda dtype=dtype: double.all_gather_single(flat.to(dtype), run.to(dtype)))
    expect_refusal("even runs", lambda: double.reduce_scatter_single(torch.zeros(1), flat))
    uneven = [torch.zeros(1 + rank) for rank in range(size)]
    expect_refusal("one size", lambda: double.all_to_all([torch.zeros_like(piece) for piece in uneven], uneven))
    expect_refusal("fill its tensors", lambda: double.all_to_all_single(flat, flat.clone(), [1] * size, [1] * size))
    assert double.calls == []


def group_of(rank: int, size: int) -> Group:
    return Group(
        rank=rank,
        world_size=size,
        device_type="cpu",
        timeout=20.0,
        control=LocalControl(),
        process_group=dist.group.WORLD,
    )


def routes_taken(vendor: str) -> dict[str, list[str]]:
    """Which functions of the double a reduce_scatter and an all_gather end in, even and uneven."""
    rank, size = dist.get_rank(), dist.get_world_size()
    double: StrictDouble = AscendDouble() if vendor == "ascend" else HabanaDouble()
    make: Callable[..., Communicator] = getattr(shardrt_hccl, f"make_{vendor}")
    comm = negotiate(make(group_of(rank, size), ops=double), dtypes=["float32", "float64"])
    assert isinstance(comm, Negotiated)
    taken: dict[str, list[str]] = {}
    for what, splits in (("even", [2] * size), ("uneven", [1 + peer for peer in range(size)])):
        for dtype in (torch.float32, torch.float64):
            double.calls.clear()
            buffer = torch.full((sum(splits),), float(rank), dtype=dtype)
            comm.reduce_scatter(buffer, splits, average=True).wait()
            comm.all_gather(buffer, splits).wait()
            assert torch.equal(buffer, torch.full_like(buffer, (size - 1) / 2))
            taken[f"{what} {dtype}"] = list(double.calls)
    return taken


def test_the_doubles_refuse(ranks: RankPool) -> None:
    for size in (2, 3):
        ranks.run(refusals_of_ascend, ranks=size, init="gloo")
        ranks.run(refusals_of_habana, ranks=size, init="gloo")


def test_ascend_takes_its_own_way_where_there_is_one(ranks: RankPool) -> None:
    natively = ["reduce_scatter_tensor", "all_gather_into_tensor"]
    by_exchange = ["all_to_all", "all_gather_into_tensor"]
    assert ranks.run(routes_taken, ranks=2, init="gloo", vendor="ascend")[0] == {
        "even torch.float32": natively,
        "even torch.float64": by_exchange,
        "uneven torch.float32": natively,
        "uneven torch.float64": by_exchange,
    }
    three = ranks.run(routes_taken, ranks=3, init="gloo", vendor="ascend")
    assert three[0] == three[2] == {key: ["all_to_all", "all_to_all"] for key in three[0]}


def test_habana_packs_its_exchange(ranks: RankPool) -> None:
    natively = ["reduce_scatter_single", "all_gather_single"]
    by_exchange = ["all_to_all_single", "all_gather_single"]
    assert ranks.run(routes_taken, ranks=3, init="gloo", vendor="habana")[1] == {
        "even torch.float32": natively,
        "even torch.float64": by_exchange,
        "uneven torch.float32": natively,
        "uneven torch.float64": by_exchange,
    }


def test_the_records() -> None:
    records = list(shardrt_hccl.shardrt_backends())
    assert [record.key for record in records] == [("npu", "hccl"), ("hpu", "hccl")]
    assert {(record.process_group, record.priority) for record in records} == {("hccl", 100)}


def test_refusals_where_nothing_is_installed() -> None:
    texts = []
    for record in shardrt_hccl.shardrt_backends():
        with pytest.raises(BackendUnavailableError) as refusal:
            require_available(record)
        texts.append(str(refusal.value))
    assert texts == [
        "backend 'hccl' (device npu) is unavailable: the package torch_npu is not installed; "
        "fix: install CANN and the torch-npu release that matches this torch",
        "backend 'hccl' (device hpu) is unavailable: the package habana_frameworks is not installed; "
        "fix: install the Intel Gaudi software with its PyTorch, or use its container",
    ]


@pytest.fixture
def vendors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both vendors' packages on the path; importing either ends the process, as theirs may."""
    for package in ("torch_npu", "habana_frameworks"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("import sys\nsys.exit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH", *LAUNCHER):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def test_a_missing_library_is_noticed_without_loading_anything(vendors: Path) -> None:
    answer = shardrt_hccl.ascend.probe()
    assert not answer.ok
    assert answer.reason == (
        "torch_npu is installed but libhccl.so is not found, without which importing it may end the process"
    )
    assert "set_env.sh" in answer.fix
    assert "torch_npu" not in sys.modules


@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH"])
def test_the_library_is_looked_for_where_cann_puts_it(
    vendors: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    folder = vendors / "cann" / "lib64"
    folder.mkdir(parents=True)
    (folder / "libhccl.so").touch()
    monkeypatch.setenv(variable, str(folder if variable == "LD_LIBRARY_PATH" else folder.parent))
    assert shardrt_hccl.ascend.probe().ok
    assert "torch_npu" not in sys.modules


def test_probing_imports_no_vendor_package_and_no_torch(vendors: Path) -> None:
    """In a process of its own, where an exit would show."""
    (vendors / "libhccl.so").touch()
    code = (
        "import sys, shardrt_hccl\n"
        "assert [record.probe().ok for record in shardrt_hccl.shardrt_backends()] == [True, True]\n"
        "assert not {'torch', 'torch_npu', 'habana_frameworks'} & set(sys.modules)\n"
        "print('still here')"
    )
    path = os.pathsep.join([str(vendors), *(entry for entry in sys.path if entry)])
    environment = {**os.environ, "PYTHONPATH": path, "LD_LIBRARY_PATH": str(vendors)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "still here\n"), done.stderr


def test_an_exit_while_loading_becomes_an_error(vendors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (vendors / "libhccl.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(vendors))
    for variable in LAUNCHER:
        monkeypatch.setenv(variable, "0")
    for vendor, module in (("ascend", "torch_npu"), ("habana", "habana_frameworks.torch.distributed.hccl")):
        with pytest.raises(BackendUnavailableError, match=f"importing {module} failed with SystemExit: imported"):
            getattr(shardrt_hccl, vendor).prepare()


def test_loading_where_nothing_is_installed_is_refused() -> None:
    for vendor, package in (("ascend", "torch_npu"), ("habana", "habana_frameworks")):
        with pytest.raises(BackendUnavailableError, match=f"the package {package} is not installed; fix: "):
            getattr(shardrt_hccl, vendor).prepare()


def test_habana_is_not_loaded_without_the_launchers_variables(vendors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(BackendUnavailableError, match="WORLD_SIZE, LOCAL_RANK are not set; fix: start with torchrun"):
        shardrt_hccl.habana.prepare()
    assert "habana_frameworks" not in sys.modules


def test_ascend_is_not_loaded_over_another_vendors_device(vendors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (vendors / "libhccl.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(vendors))
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "dpu")
    with pytest.raises(BackendUnavailableError, match="PrivateUse1 device is already named 'dpu' by another package"):
        shardrt_hccl.ascend.prepare()


def well_behaved(package: Path, device: str) -> None:
    """A vendor package that does what its import is for: makes torch know ``hccl`` for its device."""
    package.mkdir(parents=True, exist_ok=True)
    for folder in (package, *package.parents):
        if folder.name.startswith(("torch_npu", "habana_frameworks", "torch", "distributed", "hccl")):
            (folder / "__init__.py").write_text("")
    (package / "__init__.py").write_text(
        f"from torch.distributed import Backend\nBackend.backend_capability['hccl'] = [{device!r}]\n"
    )


@pytest.mark.parametrize(
    ("vendor", "package", "device"),
    [("ascend", "torch_npu", "npu"), ("habana", "habana_frameworks/torch/distributed/hccl", "hpu")],
)
def test_loading_registers_the_backend_for_its_own_device(
    vendors: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, package: str, device: str
) -> None:
    (vendors / "libhccl.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(vendors))
    for variable in LAUNCHER:
        monkeypatch.setenv(variable, "0")
    monkeypatch.setattr(dist.Backend, "backend_capability", dict(dist.Backend.backend_capability))
    before = set(sys.modules)
    prepare: Callable[[], Any] = getattr(shardrt_hccl, vendor).prepare
    try:
        well_behaved(vendors / package, "xpu")
        with pytest.raises(BackendUnavailableError, match=r"torch has 'hccl' for xpu; fix: .* only one vendor's"):
            prepare()
        for name in set(sys.modules) - before:
            del sys.modules[name]
        well_behaved(vendors / package, device)
        prepare()
        assert dist.Backend.backend_capability["hccl"] == [device]
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]

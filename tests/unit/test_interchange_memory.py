"""States larger than the memory that is allowed: written under a hard limit, read with what stays small."""

from __future__ import annotations

import gc
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from shardrt.interchange import read_dcp, read_hf, read_torch, write_dcp, write_hf, write_torch
from shardrt.state.portable import LazyTensor, PortableOptimizer, PortableState
from shardrt.testing import RankPool
from tests.doubles.safetensors_double import PlainSafetensors

ELEMENTS = 12 << 20
TENSORS = 3
ALLOWED = 40 << 20
"""Bytes of anonymous memory, for a state of three tensors of 48 MiB."""


def status(field: str) -> int:
    """Bytes, from what the kernel says about this process."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":")]
    return int(line.split()[1]) * 1024


def made(seed: int) -> LazyTensor:
    """A large tensor that exists only where it is read."""

    def read(start: int, stop: int) -> torch.Tensor:
        return torch.arange(start, stop, dtype=torch.int32).mul_(seed).view(torch.float32)

    return LazyTensor(dtype="float32", shape=(ELEMENTS // 4, 4), read=read)


@contextmanager
def limited() -> Iterator[None]:
    """No more private memory than there is now and ALLOWED: the system refuses it."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + ALLOWED, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def the_limit_holds() -> bool:
    """Whether memory for the whole state cannot be had under the limit; the allocator may have some of it left over."""
    gc.collect()
    with limited():
        try:
            torch.empty(TENSORS * ELEMENTS)
        except RuntimeError:
            return True
    return False


def write_and_read(kind: str) -> list[int]:
    """On a worker: write under the limit, read window by window; bytes of anonymous memory before and at most."""
    torch.set_num_threads(1)
    model = {f"w{number}": made(number + 1) for number in range(TENSORS - 1)}
    optimizer = PortableOptimizer(groups=({"lr": 0.1, "params": list(model)},), state={"w0": {"exp_avg": made(7)}})
    state = PortableState(models={"model": model}, optimizers={} if kind == "hf" else {"optimizer": optimizer})
    small = PortableState(models={"model": {"w": LazyTensor.of(torch.ones(9000))}}, optimizers={})
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write(kind, small, root / "small")  # whatever is imported or set up once is not what is measured
        gc.collect()
        with limited():
            write(kind, state, root / "large")
        found = read(kind, root / "large")
        tensors = list(found.models["model"].values())
        tensors += [entry["exp_avg"] for held in found.optimizers.values() for entry in held.state.values()]
        assert len(tensors) == (TENSORS - 1 if kind == "hf" else TENSORS)
        gc.collect()
        before = most = status("RssAnon")
        for lazy, seed in zip(tensors, (1, 2, 7), strict=False):
            expected = made(seed)
            for start in range(0, lazy.numel, 1 << 20):
                piece = lazy.read(start, start + (1 << 20))
                assert torch.equal(piece.view(torch.int32), expected.read(start, start + (1 << 20)).view(torch.int32))
                most = max(most, status("RssAnon"))
        return [before, most]


def write(kind: str, state: PortableState, path: Path) -> None:
    if kind == "torch":
        path.mkdir()
        write_torch(state, path / "m.pt", path / "o.pt" if state.optimizers else None)
    elif kind == "dcp":
        write_dcp(state, path)
    else:
        write_hf(state, path, format=PlainSafetensors())


def read(kind: str, path: Path) -> PortableState:
    if kind == "torch":
        return read_torch(path / "m.pt", path / "o.pt")
    return read_dcp(path) if kind == "dcp" else read_hf(path, format=PlainSafetensors())


@pytest.mark.parametrize("kind", ["torch", "dcp", "hf"])
def test_memory_stays_bounded(ranks: RankPool, kind: str) -> None:
    [[before, most]] = ranks.run(write_and_read, ranks=1, init=None, timeout=120, kind=kind)
    assert most - before < ALLOWED


def test_the_limit_is_one(ranks: RankPool) -> None:
    assert ranks.run(the_limit_holds, ranks=1, init=None) == [True]

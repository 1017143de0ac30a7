"""What a rank is said to hold at most, where some of it is shared."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shardrt.bench.memory import peak_memory

_BYTES = 64 * 2**20
_READER = """
import mmap, sys
shared = mmap.mmap(int(sys.argv[1]), int(sys.argv[2]), prot=mmap.PROT_READ)
for page in range(0, len(shared), mmap.PAGESIZE):
    shared[page]
print("read", flush=True)
sys.stdin.read()
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd")


@pytest.fixture
def written() -> Iterator[tuple[int, mmap.mmap]]:
    fd = os.memfd_create("shardrt-test")
    os.ftruncate(fd, _BYTES)
    with mmap.mmap(fd, _BYTES) as shared:
        yield fd, shared
    os.close(fd)


def _fill(shared: mmap.mmap) -> None:
    for page in range(0, len(shared), mmap.PAGESIZE):
        shared[page] = 1


def test_memory_that_nobody_else_has_mapped_counts_in_full(written: tuple[int, mmap.mmap]) -> None:
    with peak_memory() as peak:
        _fill(written[1])
    if peak.nbytes is None:
        pytest.skip("the system does not say how much memory a process had")
    assert _BYTES <= peak.nbytes < 1.2 * _BYTES


def test_pages_that_two_processes_have_mapped_count_half_in_each(written: tuple[int, mmap.mmap]) -> None:
    fd, shared = written
    with peak_memory() as peak:
        _fill(shared)
        reader = subprocess.Popen(
            [sys.executable, "-c", _READER, str(fd), str(_BYTES)],
            pass_fds=[fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert reader.stdout is not None
        assert reader.stdout.readline() == "read\n"
    reader.communicate(timeout=30)
    if peak.nbytes is None:
        pytest.skip("the system does not say how much memory a process had")
    assert 0.5 * _BYTES <= peak.nbytes < 0.7 * _BYTES

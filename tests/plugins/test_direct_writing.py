"""Files that are written past the system's memory hold what was written, whatever the file system takes."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from shardrt_files.direct_writing import PIECE, DirectWriter
from shardrt_files.local import LocalPlace


def pieces(seed: int, total: int) -> list[bytes]:
    chance = random.Random(seed)
    found = []
    while total > 0:
        count = min(total, chance.choice([1, 7, 4096, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE]))
        found.append(chance.randbytes(count))
        total -= count
    return found


@pytest.mark.parametrize("total", [0, 1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 511])
def test_a_file_holds_what_was_written(tmp_path: Path, total: int) -> None:
    data = pieces(total, total)
    file = LocalPlace(tmp_path).create("file")
    for piece in data:
        file.write(piece)
    file.commit()
    assert (tmp_path / "file").read_bytes() == b"".join(data)


def test_whole_pieces_go_past_the_page_cache_and_the_last_one_does_not(tmp_path: Path) -> None:
    ways: list[tuple[bool, int]] = []
    real = os.write

    def watched(file: int, data: Any) -> int:
        ways.append((bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT), len(data)))
        return real(file, data)

    with (tmp_path / "file").open("wb", buffering=0) as file, mock.patch.object(os, "write", watched):
        writer = DirectWriter(file.fileno())
        try:
            fcntl.fcntl(file.fileno(), fcntl.F_SETFL, fcntl.fcntl(file.fileno(), fcntl.F_GETFL) | os.O_DIRECT)
            direct = True
        except OSError:  # a file system without it: everything goes the usual way
            direct = False
        fcntl.fcntl(file.fileno(), fcntl.F_SETFL, fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & ~os.O_DIRECT)
        writer.write(memoryview(bytes(2 * PIECE + 5)))
        writer.flush()
    assert ways == [(direct, PIECE), (direct, PIECE), (False, 5)]


def test_a_file_system_that_does_not_take_it_gets_the_bytes_in_the_usual_way(tmp_path: Path) -> None:
    real = os.write
    refused = 0

    def stubborn(file: int, data: Any) -> int:
        nonlocal refused
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            refused += 1
            raise OSError(errno.EINVAL, "no")
        return real(file, data)

    data = random.Random(0).randbytes(3 * PIECE + 9)
    with (tmp_path / "file").open("wb", buffering=0) as file, mock.patch.object(os, "write", stubborn):
        writer = DirectWriter(file.fileno())
        writer.write(memoryview(data))
        writer.flush()
    assert (tmp_path / "file").read_bytes() == data
    assert refused <= 1


def test_short_writes_are_gone_on_with(tmp_path: Path) -> None:
    real = os.write
    data = random.Random(0).randbytes(2 * PIECE + 9)
    with (
        (tmp_path / "file").open("wb", buffering=0) as file,
        mock.patch.object(os, "write", lambda file, data: real(file, data[: max(1, len(data) // 2)])),
    ):
        writer = DirectWriter(file.fileno())
        writer.write(memoryview(data))
        writer.flush()
    assert (tmp_path / "file").read_bytes() == data

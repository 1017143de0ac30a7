"""Pages of files that are shown privately: what was written to them is forgotten, the rest is left mapped."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from shardrt_shm import mapping
from shardrt_shm.mapping import PAGE, Stretch

PAGES = 512


@pytest.fixture
def file() -> Iterator[int]:
    """Of as many pages, each with its number in its bytes."""
    fd = os.memfd_create("pages")
    os.write(fd, b"".join(bytes([page % 251]) * PAGE for page in range(PAGES)))
    yield fd
    os.close(fd)


def shown(file: int) -> Stretch:
    """An empty page, all pages of the file, and another empty page."""
    stretch = Stretch((PAGES + 2) * PAGE)
    stretch.show(PAGE, PAGES * PAGE, file, 0)
    return stretch


def faults_of_reading(stretch: Stretch) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    stretch.memory[::PAGE].sum()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.parametrize("written", [1, 2, PAGES // 2, PAGES])
def test_what_was_written_to_any_page_of_a_file_is_forgotten(file: int, written: int) -> None:
    stretch = shown(file)
    before = stretch.memory.clone()
    stretch.memory[written * PAGE + 5] = 255
    stretch.drop()
    assert stretch.memory.equal(before)
    assert os.pread(file, 1, (written - 1) * PAGE + 5) == bytes([(written - 1) % 251])


@pytest.mark.parametrize("own_pages", [False, True])
def test_what_was_only_read_stays_mapped(file: int, own_pages: bool) -> None:
    stretch = shown(file)
    if own_pages:  # pages that are no file's are written all the time
        stretch.memory[0] = stretch.memory[-1] = 9
    first = faults_of_reading(stretch)
    stretch.drop()
    assert faults_of_reading(stretch) < max(first, PAGES // 16) // 4


def test_pages_that_stay_mapped_follow_their_owner(file: int) -> None:
    stretch = shown(file)
    stretch.memory.sum()
    stretch.drop()
    os.pwrite(file, b"\xfe", 7 * PAGE)
    assert stretch.memory[8 * PAGE] == 254


@pytest.mark.parametrize("told", [None, b"", b"12345678"])
def test_where_the_system_does_not_tell_everything_is_dropped(
    file: int, told: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "pagemap"
    if told is not None:
        silent.write_bytes(told)
    monkeypatch.setattr(mapping, "_PAGE_MAP", silent)
    stretch = shown(file)
    before = stretch.memory.clone()
    stretch.memory[3 * PAGE] = 255
    stretch.drop()
    assert stretch.memory.equal(before)


def test_an_answer_without_a_single_page_is_not_believed(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping.np, "frombuffer", lambda told, dtype: mapping.np.zeros(len(told) // 8, dtype))
    stretch = shown(file)
    before = stretch.memory.clone()
    stretch.memory[3 * PAGE] = 255
    stretch.drop()
    assert stretch.memory.equal(before)

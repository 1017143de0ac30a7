"""What every place must get right when it writes."""

from __future__ import annotations

import array
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardrt.protocols import Place, PlaceFile

_TIMEOUT = 60.0
_ROUNDS = 40
"""Of a writer and a reader side by side."""
_DATA = bytes(range(256)) * 16


class PlaceWritingChecks:
    """The part of :class:`~shardrt.testing.PlaceConformance` that is about writing."""

    @classmethod
    def make(cls, directory: Path) -> Place:
        """See :meth:`PlaceConformance.make <shardrt.testing.PlaceConformance.make>`."""
        raise NotImplementedError("a conformance class must say how to make its place: override make()")

    def test_publishing_replaces(self, tmp_path: Path) -> None:
        """The last one counts, shorter or longer, and nothing else is left there."""
        place = self.make(tmp_path)
        for data in (b"first", b"", b"x" * 300_000, b"last"):
            place.publish("a/b/manifest.json", data)
            assert place.read("a/b/manifest.json") == data
            assert (place.list(), place.list("a"), place.list("a/b")) == (["a/"], ["b/"], ["manifest.json"])

    def test_publishing_is_whole_or_nothing(self, tmp_path: Path) -> None:
        """Whoever reads while it is replaced gets the old bytes or the new ones, and always some."""
        versions = [bytes([65 + index]) * 50_000 for index in range(4)]
        self.make(tmp_path).publish("f", versions[0])
        done = threading.Event()

        def write() -> None:
            place = self.make(tmp_path)
            try:
                for index in range(_ROUNDS):
                    place.publish("f", versions[index % len(versions)])
            finally:
                done.set()

        def read() -> set[bytes]:
            place = self.make(tmp_path)
            seen = set()
            while not done.is_set():
                seen.add(place.read("f"))
            seen.add(place.read("f"))
            return seen

        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            pool.submit(write).result(timeout=_TIMEOUT)
            for reader in readers:
                torn = reader.result(timeout=_TIMEOUT) - set(versions)
                assert not torn, f"{len(torn)} readings were of no version; lengths {sorted(map(len, torn))}"

    def test_a_file_is_written_in_pieces(self, tmp_path: Path) -> None:
        """Bytes and memory of any item size, empty pieces included, in the order of the calls."""
        place = self.make(tmp_path)
        numbers = array.array("d", range(1000))
        pieces: list[Any] = [b"", b"header", memoryview(_DATA)[3:777], memoryview(numbers), memoryview(b""), b"end"]
        file = place.create("step-1/rank0/file")
        for piece in pieces:
            file.write(piece)
        file.commit()
        whole = b"".join(bytes(memoryview(piece).cast("B")) for piece in pieces)
        assert (place.size("step-1/rank0/file"), place.read("step-1/rank0/file")) == (len(whole), whole)
        assert (place.list("step-1"), place.list("step-1/rank0")) == (["rank0/"], ["file"])

    def test_memory_may_be_reused_after_a_write(self, tmp_path: Path) -> None:
        """What was written is what was there when ``write`` was called."""
        place = self.make(tmp_path)
        memory = bytearray(100_000)
        file = place.create("f")
        for value in range(1, 6):
            memory[:] = bytes([value]) * len(memory)
            file.write(memoryview(memory))
        memory[:] = bytes(len(memory))
        file.commit()
        assert place.read("f") == b"".join(bytes([value]) * len(memory) for value in range(1, 6))

    def test_a_file_may_have_no_bytes(self, tmp_path: Path) -> None:
        """It exists all the same."""
        place = self.make(tmp_path)
        place.create("d/f").commit()
        assert (place.list("d"), place.size("d/f"), place.read("d/f")) == (["f"], 0, b"")

    def test_a_file_is_not_complete_before_commit(self, tmp_path: Path) -> None:
        """Under its name there is nothing yet, or less than was written."""
        place = self.make(tmp_path)
        file = place.create("d/f")
        file.write(_DATA)
        file.write(_DATA)
        assert _found(place, "d/f") != _DATA + _DATA
        file.commit()
        assert _found(self.make(tmp_path), "d/f") == _DATA + _DATA

    def test_an_abandoned_file_is_not_there(self, tmp_path: Path) -> None:
        """Nor is it after abandoning it again; the name can be used anew."""
        place = self.make(tmp_path)
        for pieces in ([], [_DATA], [_DATA] * 3):
            file = place.create("d/f")
            for piece in pieces:
                file.write(piece)
            file.abandon()
            file.abandon()
            assert _found(place, "d/f") is None
            assert place.list("d") == []
        place.publish("d/f", b"new")
        assert place.read("d/f") == b"new"

    def test_a_forgotten_file_is_not_complete(self, tmp_path: Path) -> None:
        """An exception may drop it without a word: then nothing may finish it."""
        place = self.make(tmp_path)
        file: PlaceFile | None = place.create("d/f")
        assert file is not None
        file.write(_DATA)
        file = None
        gc.collect()
        assert _found(place, "d/f") != _DATA

    def test_abandoning_after_commit_does_nothing(self, tmp_path: Path) -> None:
        """So that it can stand in a ``finally``."""
        place = self.make(tmp_path)
        file = place.create("f")
        file.write(b"kept")
        file.commit()
        file.abandon()
        assert place.read("f") == b"kept"

    def test_a_file_replaces_what_had_its_name(self, tmp_path: Path) -> None:
        """Longer or shorter, nothing of the old one stays."""
        place = self.make(tmp_path)
        for data in (b"long " * 1000, b"short"):
            file = place.create("f")
            file.write(data)
            file.commit()
            assert (place.read("f"), place.list()) == (data, ["f"])

    def test_several_files_at_once(self, tmp_path: Path) -> None:
        """Open side by side in one directory and in several, each gets its own bytes."""
        place = self.make(tmp_path)
        paths = ["a/1", "a/2", "b/1", "c"]
        files = {path: place.create(path) for path in paths}
        for index in range(5):
            for path, file in files.items():
                file.write(f"{path}:{index};".encode())
        for file in files.values():
            file.commit()
        for path in paths:
            assert place.read(path) == "".join(f"{path}:{index};" for index in range(5)).encode()

    def test_writers_in_different_directories_do_not_meet(self, tmp_path: Path) -> None:
        """As ranks do: at the same time, each with an instance of its own, directories made by whoever is first."""
        barrier = threading.Barrier(4, timeout=_TIMEOUT)

        def write(rank: int) -> None:
            place = self.make(tmp_path)
            barrier.wait()
            for number in range(5):
                file = place.create(f"run/step-{number}/rank{rank}/state")
                for _ in range(8):
                    file.write(bytes([rank]) * 65_536)
                file.commit()

        with ThreadPoolExecutor(4) as pool:
            for written in [pool.submit(write, rank) for rank in range(4)]:
                written.result(timeout=_TIMEOUT)
        place = self.make(tmp_path)
        for number in range(5):
            assert place.list(f"run/step-{number}") == [f"rank{rank}/" for rank in range(4)]
            for rank in range(4):
                assert place.read(f"run/step-{number}/rank{rank}/state") == bytes([rank]) * 8 * 65_536


def _found(place: Place, path: str) -> bytes | None:
    with suppress(FileNotFoundError):
        return place.read(path)
    return None

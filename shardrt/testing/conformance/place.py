"""What every place must get right: reading, listing, removing, and paths that lead out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardrt.errors import CheckpointError
from shardrt.protocols import Place
from shardrt.testing.conformance.place_writing import PlaceWritingChecks

_NAMES = (
    "rank0.safetensors",
    "with space",
    "größe",
    "重み",
    "😀",
    "100%",
    "%20",
    "#1",
    "a?b",
    "star*",
    "[a-z]",
    "{a,b}",
    "it's",
    'quo"te',
    "$HOME",
    "~",
    "-rf",
    ".hidden",
    "...",
    "a:b",
    "a+b&c=d",
    "n" * 200,
)
_ESCAPES = (
    "/absolute",
    "//absolute",
    "../outside",
    "a/../../outside",
    "a/..",
    "..",
    ".",
    "./a",
    "a/./b",
    "a//b",
    "a/",
    "back\\slash",
    "..\\outside",
    "nul\0",
)
_ACTIONS: dict[str, Callable[[Place, str], Any]] = {
    "create": lambda place, path: place.create(path),
    "publish": lambda place, path: place.publish(path, b"x"),
    "read": lambda place, path: place.read(path),
    "read_into": lambda place, path: place.read_into(path, 0, memoryview(bytearray(1))),
    "size": lambda place, path: place.size(path),
    "list": lambda place, path: place.list(path),
    "remove": lambda place, path: place.remove(path),
}
_READING = ("read", "read_into", "size")


class PlaceConformance(PlaceWritingChecks):
    """Subclass it in a test module as ``class TestMine(PlaceConformance)`` and say how to make yours.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from shardrt import load_registry
        >>> from shardrt.testing import PlaceConformance
        >>> class TestFiles(PlaceConformance):
        ...     @classmethod
        ...     def make(cls, directory):
        ...         return load_registry().places.get("files").factory(directory)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     TestFiles().test_a_directory_is_listed_in_order(Path(directory))
    """

    @classmethod
    def make(cls, directory: Path) -> Place:
        """The place under test. ``directory`` is empty and differs from test to test: put the files there, or under a
        name made of it. Two calls with the same directory give places with the same files."""
        raise NotImplementedError("a conformance class must say how to make its place: override make()")

    def test_is_a_place(self, tmp_path: Path) -> None:
        """It has the attributes of the protocol, and there is nothing in a new one."""
        place = self.make(tmp_path)
        assert isinstance(place, Place)
        assert isinstance(place.name, str) and place.name
        assert isinstance(place.root, str) and place.root
        assert place.list() == []

    def test_ranges_are_cut_where_the_file_ends(self, tmp_path: Path) -> None:
        """``[start, stop)`` as a slice of bytes has it."""
        place = self.make(tmp_path)
        data = bytes(range(100))
        place.publish("d/f", data)
        for start in (0, 1, 50, 99, 100, 101, 10**15):
            for stop in (None, 0, 1, 50, 51, 99, 100, 101, 10**6, 10**15):
                assert place.read("d/f", start, stop) == data[start:stop], (start, stop)

    def test_reading_into_memory_fills_what_there_is(self, tmp_path: Path) -> None:
        """The buffer's bytes from the file, their number returned, and the rest of the buffer as it was."""
        place = self.make(tmp_path)
        data = bytes(range(1, 101))
        place.publish("f", data)
        for start in (0, 1, 60, 99, 100, 200, 10**15):
            for length in (0, 1, 40, 100, 150):
                memory = bytearray(length + 20)
                count = place.read_into("f", start, memoryview(memory)[10 : 10 + length])
                expected = data[start : start + length]
                assert count == len(expected), (start, length)
                assert memory == bytes(10) + expected + bytes(length + 10 - len(expected)), (start, length)

    def test_reading_into_memory_of_other_items(self, tmp_path: Path) -> None:
        """A buffer of larger items is filled byte by byte."""
        place = self.make(tmp_path)
        place.publish("f", bytes(range(64)))
        memory = bytearray(32)
        assert place.read_into("f", 8, memoryview(memory).cast("I")) == 32
        assert memory == bytes(range(8, 40))

    def test_a_large_file_is_read_in_pieces(self, tmp_path: Path) -> None:
        """Ranges of a file of 40 MB, into memory and not."""
        place = self.make(tmp_path)
        block = bytes(range(256)) * 4096
        file = place.create("large")
        for index in range(40):
            file.write(index.to_bytes(4, "little") + block[4:])
        file.commit()
        assert place.size("large") == 40 * 2**20
        memory = bytearray(39 * 2**20)
        assert place.read_into("large", 2**20, memoryview(memory)) == len(memory)
        for index in range(39):
            part = memoryview(memory)[index * 2**20 : (index + 1) * 2**20]
            assert part[:4] == (index + 1).to_bytes(4, "little") and part[4:] == block[4:], index
        assert place.read("large", 7 * 2**20, 9 * 2**20)[2**20 - 1 : 2**20 + 5] == b"\xff\x08\0\0\0\x04"

    def test_size(self, tmp_path: Path) -> None:
        """Bytes of a file, none included."""
        place = self.make(tmp_path)
        place.publish("none", b"")
        place.publish("some", b"12345")
        assert (place.size("none"), place.size("some")) == (0, 5)
        assert (place.read("none"), place.read("none", 0, 5)) == (b"", b"")

    def test_a_directory_is_listed_in_order(self, tmp_path: Path) -> None:
        """Names are sorted, and directories end in a slash; what lies deeper is not told."""
        place = self.make(tmp_path)
        for path in ("b", "a/one", "a/two/deep", "c/three", "Z"):
            place.publish(path, b"")
        assert place.list() == ["Z", "a/", "b", "c/"]
        assert place.list("a") == ["one", "two/"]
        assert place.list("a/two") == ["deep"]
        assert place.list("missing") == place.list("missing/deeper") == []

    @pytest.mark.parametrize("name", _NAMES, ids=lambda name: ascii(name)[:20])
    def test_names_are_taken_literally(self, tmp_path: Path, name: str) -> None:
        """No pattern, no escape, no variable: as a file and as a directory."""
        place = self.make(tmp_path)
        place.publish("other/inside", b"1")
        place.publish(name, b"2")
        place.publish(f"in/{name}/{name}", b"3")
        assert place.list() == sorted(["in/", name, "other/"])
        assert (place.list("in"), place.list(f"in/{name}")) == ([f"{name}/"], [name])
        assert (place.read(name), place.read(f"in/{name}/{name}"), place.size(name)) == (b"2", b"3", 1)
        place.remove(name)
        assert place.list() == ["in/", "other/"]
        place.remove(f"in/{name}")
        assert place.list("in") == []
        assert place.read("other/inside") == b"1"

    @pytest.mark.parametrize("action", _READING)
    def test_what_is_not_there_is_a_file_not_found(self, tmp_path: Path, action: str) -> None:
        """``FileNotFoundError`` with the path, whether its directory exists or not."""
        place = self.make(tmp_path)
        place.publish("there/file", b"x")
        for path in ("missing", "there/missing", "missing/deeper/file"):
            with pytest.raises(FileNotFoundError, match="missing"):
                _ACTIONS[action](place, path)

    @pytest.mark.parametrize("action", _READING)
    def test_a_directory_is_no_file(self, tmp_path: Path, action: str) -> None:
        """Some places have no directories, and then there is no such file."""
        place = self.make(tmp_path)
        place.publish("directory/file", b"x")
        with pytest.raises((CheckpointError, FileNotFoundError), match="directory"):
            _ACTIONS[action](place, "directory")

    @pytest.mark.parametrize("action", _ACTIONS)
    @pytest.mark.parametrize("path", _ESCAPES, ids=ascii)
    def test_a_path_that_leads_out_is_refused(self, tmp_path: Path, path: str, action: str) -> None:
        """Absolute ones, parts that go up or mean nothing, backslashes: an error with path and root."""
        inside, outside = tmp_path / "inside", tmp_path / "outside"
        inside.mkdir()
        outside.write_bytes(b"not for you")
        place = self.make(inside)
        place.publish("a/b", b"x")
        with pytest.raises(CheckpointError) as caught:
            _ACTIONS[action](place, path)
        assert repr(path) in str(caught.value) and place.root in str(caught.value)
        assert outside.read_bytes() == b"not for you"
        assert (place.list(), place.read("a/b")) == (["a/"], b"x")

    @pytest.mark.parametrize("action", sorted(set(_ACTIONS) - {"list"}))
    def test_the_root_itself_is_no_file(self, tmp_path: Path, action: str) -> None:
        """The empty path is for ``list`` alone: nobody removes a whole place by mistake."""
        place = self.make(tmp_path)
        place.publish("a", b"x")
        with pytest.raises(CheckpointError):
            _ACTIONS[action](place, "")
        assert place.list() == ["a"]

    def test_removing(self, tmp_path: Path) -> None:
        """Files, and directories with all that is in them; neighbours stay."""
        place = self.make(tmp_path)
        paths = ["step-1/a", "step-1/deep/b", "step-1/deep/er/c", "step-10/a", "step-1.json", "file"]
        for path in paths:
            place.publish(path, path.encode())
        place.remove("file")
        assert place.list() == ["step-1.json", "step-1/", "step-10/"]
        place.remove("step-1")
        assert place.list() == ["step-1.json", "step-10/"]
        assert place.list("step-1") == place.list("step-1/deep") == []
        with pytest.raises(FileNotFoundError):
            place.read("step-1/deep/b")
        assert (place.read("step-10/a"), place.read("step-1.json")) == (b"step-10/a", b"step-1.json")
        place.publish("step-1/a", b"again")
        assert place.list("step-1") == ["a"]

    def test_removing_what_is_not_there(self, tmp_path: Path) -> None:
        """Needs no removing, twice or in a directory that is not there."""
        place = self.make(tmp_path)
        for _ in range(2):
            place.remove("missing")
            place.remove("missing/deeper")
        place.publish("a/b", b"x")
        for _ in range(2):
            place.remove("a")
        assert place.list("a") == []

    def test_another_instance_sees_the_same(self, tmp_path: Path) -> None:
        """Ranks have a place each, over the same files: what one did, the others see at once."""
        mine, theirs = self.make(tmp_path), self.make(tmp_path)
        assert theirs.list("a") == []
        mine.publish("a/b", b"one")
        assert (theirs.list("a"), theirs.read("a/b"), theirs.size("a/b")) == (["b"], b"one", 3)
        mine.publish("a/b", b"longer")
        assert (theirs.read("a/b"), theirs.size("a/b")) == (b"longer", 6)
        theirs.remove("a")
        assert mine.list() == []

"""The place ``files`` through fsspec, and which addresses lead where."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import shardrt_files
from fsspec.implementations.memory import MemoryFileSystem
from shardrt_files.local import LocalPlace
from shardrt_files.remote import PIECE_BYTES, FsspecPlace
from shardrt_files.writing import WriteAsideAndMove, WriteDirectly, writing_on

from shardrt.errors import CheckpointError, ConfigError, UnsupportedError
from shardrt.protocols import Place
from tests.doubles.stores import ObjectStore, register


@pytest.fixture(autouse=True)
def empty_stores() -> Iterator[None]:
    register()
    yield
    ObjectStore.objects.clear()
    ObjectStore.uploads.clear()
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def objects(**options: Any) -> Place:
    return shardrt_files.make("objects://bucket/runs", storage_options=options)


@pytest.mark.parametrize(
    ("address", "root"),
    [
        ("/abs/olute", "/abs/olute"),
        (Path("/abs/olute"), "/abs/olute"),
        ("file:///abs/my%20run", "/abs/my run"),
        ("file://localhost/abs", "/abs"),
        ("local:///abs", "/abs"),
        ("FILE:///abs", "/abs"),
        ("/with://inside", "/with:/inside"),
    ],
)
def test_local_addresses(address: str | Path, root: str) -> None:
    place = shardrt_files.make(address)
    assert isinstance(place, LocalPlace)
    assert place.root == root


def test_relative_addresses_are_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for address in ("runs", "./runs", "a:b", Path("memory://runs")):
        assert isinstance(shardrt_files.make(address), LocalPlace)


def test_a_path_and_its_uri_are_the_same_place(tmp_path: Path) -> None:
    odd = tmp_path / "wähl #1 100%"
    shardrt_files.make(odd.as_uri()).publish("f", b"x")
    assert shardrt_files.make(odd).read("f") == b"x"


@pytest.mark.parametrize("address", ["memory://runs", "objects://bucket/runs", "simplecache::memory://runs"])
def test_other_addresses_go_through_fsspec(address: str) -> None:
    assert isinstance(shardrt_files.make(address), FsspecPlace)


@pytest.mark.parametrize(
    ("address", "options", "told"),
    [
        ("", {}, "a place is a directory or an address such as s3://bucket/runs, got ''"),
        ("a\0b", {}, "a place is a directory or an address"),
        (b"bytes", {}, "a place is a directory or an address"),
        ("file://host/abs", {}, "file://host/abs is no file on this machine; write file:///absolute/path"),
        ("file://", {}, "no file on this machine"),
        ("/abs", {"storage_options": {"key": "x"}}, r"storage_options \(key\) are for file systems of fsspec"),
        ("memory://x", {"storage_options": ["key"]}, "storage_options of files is a mapping"),
        (
            "memory://x",
            {"storage_option": {}},
            "unknown option 'storage_option' of files; .* did you mean 'storage_options'",
        ),
        ("memori://x", {}, r"fsspec does not know 'memori'; it knows: .* did you mean 'memory'?"),
    ],
)
def test_what_is_no_address_is_refused(address: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        shardrt_files.make(address, **options)


class Picky(MemoryFileSystem):  # type: ignore[misc]
    """Takes one option, and connects when it is made."""

    protocol = "picky"
    cachable = False

    def __init__(self, reachable: bool = True) -> None:
        super().__init__()
        if not reachable:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


def test_options_that_a_driver_does_not_have() -> None:
    fsspec.register_implementation("picky", Picky, clobber=True)
    with pytest.raises(ConfigError, match=r"picky://x with storage_options \['reach'\]: .* 'reach'; see fsspec's"):
        shardrt_files.make("picky://x", storage_options={"reach": True})


def test_a_host_that_does_not_answer() -> None:
    fsspec.register_implementation("picky", Picky, clobber=True)
    with pytest.raises(CheckpointError, match=r"cannot connect to 'picky' in picky://x: Connection refused"):
        shardrt_files.make("picky://x", storage_options={"reachable": False})


def test_a_missing_driver_is_named() -> None:
    fsspec.register_implementation("nodriver", "no_such_driver.FS", clobber=True, errtxt="Install it for nodriver")
    with pytest.raises(UnsupportedError) as caught:
        shardrt_files.make("nodriver://bucket/x")
    assert str(caught.value) == (
        "no file system for nodriver://bucket/x: its driver is not installed; pip install no_such_driver "
        "(Install it for nodriver)"
    )


def test_a_driver_of_fsspec_s_own_names_what_it_imports() -> None:
    fsspec.register_implementation("half", "fsspec.no_such_part.FS", clobber=True, errtxt='needs "parts"')
    with pytest.raises(UnsupportedError, match=r'pip install fsspec \(needs "parts"\)'):
        shardrt_files.make("half://x")


def test_passwords_are_not_shown() -> None:
    place = shardrt_files.make("objects://me:secret@host/runs")
    with pytest.raises(CheckpointError) as caught:
        place.publish("../f", b"")
    assert "secret" not in place.root + str(caught.value)
    assert "me:***@host" in str(caught.value)


def test_how_files_get_their_names() -> None:
    assert isinstance(writing_on(fsspec.filesystem("memory"), "/a"), WriteAsideAndMove)
    assert isinstance(writing_on(fsspec.filesystem("renaming"), "/a"), WriteAsideAndMove)
    assert isinstance(writing_on(fsspec.filesystem("objects"), "/a"), WriteDirectly)


def test_a_disk_that_cannot_rename_onto_a_file(tmp_path: Path) -> None:
    place = shardrt_files.make(f"renaming://{tmp_path}", storage_options={"replaces": False})
    for data in (b"first", b"second"):
        place.publish("d/f", data)
        assert (place.read("d/f"), place.list("d")) == (data, ["f"])
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["f"]


@pytest.mark.parametrize("at", ["open", "start", "upload", "finish"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"No space left on device \(ENOSPC\); free space there"),
        (OSError("503 Slow Down"), r"503 Slow Down \(OSError\)"),
        (PermissionError(errno.EACCES, "Forbidden"), r"Forbidden \(EACCES\); let the user"),
        (RuntimeError("token expired"), r"token expired \(RuntimeError\)"),
        (TimeoutError(), r"no reason was given \(TimeoutError\)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_upload_that_fails_leaves_what_was_there(at: str, error: Exception, words: str) -> None:
    """At every stage of it: the old object stays, and no upload is left under way."""
    objects().publish("d/f", b"old")
    place = objects(fails_at=at, error=error)
    doing = "create" if at == "open" else "write"
    with pytest.raises(CheckpointError, match=rf"cannot {doing} 'd/f' in objects://bucket/runs: {words}"):
        place.publish("d/f", b"x" * 200_000)
    assert (objects().read("d/f"), ObjectStore.uploads) == (b"old", set())


@pytest.mark.parametrize(
    ("at", "doing", "act"),
    [
        ("read", "read", lambda place: place.read("f")),
        ("read", "read", lambda place: place.read_into("f", 0, memoryview(bytearray(2)))),
        ("info", "read", lambda place: place.size("f")),
        ("ls", "list", lambda place: place.list()),
        ("delete", "remove", lambda place: place.remove("f")),
    ],
)
def test_a_driver_s_errors_have_path_and_root(at: str, doing: str, act: Any) -> None:
    objects().publish("f", b"data")
    with pytest.raises(CheckpointError, match=rf"cannot {doing} '(f|)' in objects://bucket/runs: 503 Slow Down"):
        act(objects(fails_at=at))


def test_reading_what_is_small_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No question for the size before each range: with a store every question takes its time."""
    place = objects()
    place.publish("f", bytes(range(100)))
    asked = []
    info = ObjectStore.info
    monkeypatch.setattr(ObjectStore, "info", lambda self, path, **options: asked.append(path) or info(self, path))
    assert place.read("f", 10, 20) == bytes(range(10, 20))
    assert asked == []
    assert place.read("f", 200, 210) == b""
    assert len(asked) == 1


def test_large_reads_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    place = objects()
    data = bytes(range(256)) * (2 * PIECE_BYTES // 256 + 10)
    ObjectStore.objects["bucket/runs/f"] = data
    asked = []
    cat_file = ObjectStore.cat_file

    def counted(self: ObjectStore, path: str, start: int, end: int) -> bytes:
        asked.append(end - start)
        return cat_file(self, path, start=start, end=end)

    monkeypatch.setattr(ObjectStore, "cat_file", counted)
    memory = bytearray(len(data) + 5)
    assert place.read_into("f", 1, memoryview(memory)) == len(data) - 1
    assert memory[: len(data) - 1] == data[1:]
    assert asked == [PIECE_BYTES, PIECE_BYTES, len(data) - 1 - 2 * PIECE_BYTES]


def test_a_marker_of_a_directory_is_no_file() -> None:
    """Consoles of stores make an empty object for a directory."""
    ObjectStore.objects.update({"bucket/runs/d/": b"", "bucket/runs/d/f": b"x"})
    assert objects().list("d") == ["f"]


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    for place in (objects(), shardrt_files.make("memory://x"), shardrt_files.make(tmp_path)):
        place.publish("f", b"x")
        with pytest.raises(CheckpointError, match=r"cannot list 'f' in .*ENOTDIR"):
            place.list("f")


def test_a_removal_that_others_undo_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    place = shardrt_files.make("memory://x")
    place.publish("d/f", b"x")
    monkeypatch.setattr(MemoryFileSystem, "rm", lambda self, path, recursive: None)
    with pytest.raises(CheckpointError, match=r"cannot remove 'd' in memory://x: .*; somebody writes there"):
        place.remove("d")


def test_a_file_that_is_done_cannot_be_written_to() -> None:
    for end in ("commit", "abandon"):
        file = shardrt_files.make("memory://x").create("f")
        getattr(file, end)()
        with pytest.raises(CheckpointError, match="cannot be written to"):
            file.write(b"x")

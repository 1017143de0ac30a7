"""The place ``files`` on local directories: durability, links, and what the system refuses."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import shardrt_files
from shardrt_files.direct_writing import PIECE
from shardrt_files.local import LocalPlace
from shardrt_files.temporary import temporary_name

from shardrt.errors import CheckpointError

READING: dict[str, Callable[[LocalPlace, str], Any]] = {
    "read": lambda place, path: place.read(path),
    "read_into": lambda place, path: place.read_into(path, 0, memoryview(bytearray(4))),
    "size": lambda place, path: place.size(path),
}
WRITING: dict[str, Callable[[LocalPlace, str], Any]] = {
    "create": lambda place, path: place.create(path),
    "publish": lambda place, path: place.publish(path, b"x"),
}


class Calls:
    """Notes system calls, by what they are made on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, str]] = []
        for name in ("fsync", "write", "mkdir", "replace", "preadv"):
            monkeypatch.setattr(os, name, self._noting(name, getattr(os, name)))

    def _noting(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *arguments: Any, **options: Any) -> Any:
            what = Path(f"/proc/self/fd/{first}").readlink().name if isinstance(first, int) else Path(first).name
            if name == "replace":
                what = Path(arguments[0]).name
            self.made.append((name, "partial" if what.endswith(".partial") else what))
            return real(first, *arguments, **options)

        return call


def test_a_file_is_durable_before_it_has_its_name_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = LocalPlace(tmp_path / "root")
    calls = Calls(monkeypatch)
    file = place.create("step/f")
    assert calls.made == [("mkdir", "root"), ("fsync", tmp_path.name), ("mkdir", "step"), ("fsync", "root")]
    calls.made.clear()
    file.write(b"data")
    file.commit()
    assert calls.made == [("write", "partial"), ("fsync", "partial"), ("replace", "f"), ("fsync", "step")]
    calls.made.clear()
    place.publish("step/f", b"new")
    assert calls.made == [("write", "partial"), ("fsync", "partial"), ("replace", "f"), ("fsync", "step")]


def test_a_root_of_several_new_directories_is_durable_all_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    LocalPlace(tmp_path / "a" / "b" / "c").create("f").abandon()
    made = [("mkdir", "a"), ("fsync", tmp_path.name), ("mkdir", "b"), ("fsync", "a"), ("mkdir", "c"), ("fsync", "b")]
    assert calls.made == made


def test_large_buffers_are_written_in_pieces_and_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kept piece of memory when writing, none when reading."""
    memory = bytearray(64 * 2**20)
    memory[::4096] = b"\x07" * (len(memory) // 4096)
    back = bytearray(len(memory))
    place = LocalPlace(tmp_path)
    calls = Calls(monkeypatch)
    tracemalloc.start()
    try:
        file = place.create("f")
        file.write(memoryview(memory))
        file.commit()
        assert place.read_into("f", 0, memoryview(back)) == len(memory)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert back == memory
    assert peak < 2**20
    made = [name for name, _ in calls.made if name in ("write", "preadv")]
    assert made == ["write"] * (len(memory) // PIECE) + ["preadv"]


def test_what_the_system_takes_in_parts_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: preadv(file, [view[:5] for view in views], offset))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, offset: pread(file, min(count, 3), offset))
    place = LocalPlace(tmp_path)
    data = bytes(range(200))
    place.publish("f", data)
    back = bytearray(100)
    assert place.read_into("f", 50, memoryview(back)) == 100
    assert (back, place.read("f"), place.read("f", 11, 99)) == (data[50:150], data, data[11:99])


@pytest.mark.parametrize("action", [*READING, *WRITING, "list"])
@pytest.mark.parametrize("link", ["out", "out/deeper", "inside", "up", "nowhere"])
def test_a_link_below_the_root_is_not_followed(tmp_path: Path, link: str, action: str) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    (outside / "deeper").mkdir(parents=True)
    (outside / "secret").write_bytes(b"secret")
    (outside / "deeper" / "secret").write_bytes(b"secret")
    (root / "real").mkdir(parents=True)
    (root / "out").symlink_to(outside)
    (root / "inside").symlink_to("real")
    (root / "up").symlink_to("..")
    (root / "nowhere").symlink_to("/no/such/place")
    place = LocalPlace(root)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        CheckpointError, match=r"is a symbolic link, and links below the root of a place are not followed"
    ):
        if action == "list":
            place.list(link)
        else:
            (READING | WRITING)[action](place, f"{link}/secret")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("action", READING)
def test_a_link_to_a_file_is_not_read(tmp_path: Path, action: str) -> None:
    (tmp_path / "outside").write_bytes(b"secret")
    root = tmp_path / "root"
    root.mkdir()
    (root / "f").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match=rf"cannot read 'f' in {root}: 'f' is a symbolic link.*\(ELOOP\)"):
        READING[action](LocalPlace(root), "f")


def test_writing_where_a_link_is_replaces_the_link(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"theirs")
    root = tmp_path / "root"
    root.mkdir()
    (root / "f").symlink_to(tmp_path / "outside")
    place = LocalPlace(root)
    place.publish("f", b"ours")
    assert ((tmp_path / "outside").read_bytes(), place.read("f")) == (b"theirs", b"ours")


def test_removing_takes_links_and_leaves_what_they_lead_to(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    (outside / "deep").mkdir(parents=True)
    (outside / "file").write_bytes(b"theirs")
    (root / "step" / "sub").mkdir(parents=True)
    (root / "step" / "to-directory").symlink_to(outside)
    (root / "step" / "sub" / "to-file").symlink_to(outside / "file")
    (root / "step" / "sub" / "loop").symlink_to("..")
    (root / "step" / "sub" / temporary_name()).write_bytes(b"never finished")
    (root / "direct").symlink_to(outside)
    place = LocalPlace(root)
    assert place.list("step") == ["sub/", "to-directory"]
    place.remove("step")
    place.remove("direct")
    assert place.list() == []
    assert sorted(path.name for path in outside.rglob("*")) == ["deep", "file"]


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "ckpt").symlink_to("disk")
    LocalPlace(tmp_path / "ckpt").publish("a/b", b"x")
    assert (tmp_path / "disk" / "a" / "b").read_bytes() == b"x"


@pytest.mark.parametrize("action", READING)
def test_a_pipe_does_not_block(tmp_path: Path, action: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match=r"cannot read 'pipe' .* no regular file"):
        READING[action](LocalPlace(tmp_path), "pipe")


def test_a_relative_root_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = LocalPlace("runs")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    place.publish("f", b"x")
    assert place.root == str(tmp_path / "runs")
    assert (tmp_path / "runs" / "f").read_bytes() == b"x"


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    for place in (LocalPlace(tmp_path / "f"), LocalPlace(tmp_path / "f" / "deeper")):
        for action in (*READING.values(), *WRITING.values(), lambda place, path: place.list()):
            with pytest.raises(CheckpointError, match=rf"in {place.root}: .*ENOTDIR.*; something else stands where"):
                action(place, "g")


def test_a_directory_where_a_file_is_wanted(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    place.publish("d/f", b"x")
    with pytest.raises(
        CheckpointError, match=r"cannot write 'd' in .*EISDIR.*; a directory stands where a file is needed"
    ):
        place.publish("d", b"y")
    with pytest.raises(CheckpointError, match=r"cannot create 'd/f/g' in .*ENOTDIR.*; something else stands"):
        place.publish("d/f/g", b"y")
    assert (place.list(), place.list("d"), place.read("d/f")) == (["d/"], ["f"], b"x")
    with pytest.raises(CheckpointError, match=r"cannot create .*ENAMETOOLONG.*; use shorter names"):
        place.publish("n" * 300 + "/f", b"y")


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES])
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    place = LocalPlace(tmp_path)
    place.publish("d/f", b"old")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(CheckpointError) as caught:
            place.publish("d/f", b"new")
    told = str(caught.value)
    assert told.startswith(f"cannot write 'd/f' in {tmp_path}: {os.strerror(code)} ({errno.errorcode[code]}); ")
    assert not told.endswith("see what the system says")
    assert (place.read("d/f"), sorted(path.name for path in (tmp_path / "d").iterdir())) == (b"old", ["f"])


LIMITED = """
import json, os, sys
from pathlib import Path
import shardrt_files
from shardrt.errors import CheckpointError

def report(root, before=lambda: None):
    place = shardrt_files.make(root)
    place.publish("f", b"old")
    before()
    told = []
    for name in ("f", "d/g"):
        try:
            place.publish(name, bytes(200_000))
        except CheckpointError as error:
            told.append(str(error))
    left = sorted(str(path.relative_to(root)) for path in Path(root).rglob("*"))
    try:
        place.publish("small", b"x" * 100)
        small = "written"
    except CheckpointError as error:
        small = str(error)
    print(json.dumps({"told": told, "old": place.read("f").decode(), "left": left, "small": small}))
"""


def limited(code: str, *before: str) -> dict[str, Any]:
    done = subprocess.run(
        [*before, sys.executable, "-c", LIMITED + code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    """The system takes a part of the bytes and refuses the rest."""
    code = f"""
import resource
report({str(tmp_path)!r}, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)))
"""
    found = limited(code)
    for told, name in zip(found["told"], ("f", "d/g"), strict=True):
        assert told.startswith(f"cannot write '{name}' in {tmp_path}: File too large (EFBIG); raise the limit of file")
    assert (found["old"], found["left"], found["small"]) == ("old", ["d", "f"], "written")


def test_a_full_disk(tmp_path: Path) -> None:
    """A real one of 64 kB, where this user may mount one; elsewhere a limit of the file's size has to do."""
    mount = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=64k tmpfs {tmp_path} && exec "$@"', "sh"]
    try:
        can_mount = subprocess.run([*mount, "true"], capture_output=True, timeout=60, check=False).returncode == 0
    except FileNotFoundError:
        can_mount = False
    if can_mount:
        found = limited(f"report({str(tmp_path)!r})", *mount)
        words = "No space left on device (ENOSPC); free space there"
    else:
        limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (64_000, 64_000))"
        found = limited(f"import resource\nreport({str(tmp_path)!r}, lambda: {limit})")
        words = "File too large (EFBIG); raise the limit"
    for told, name in zip(found["told"], ("f", "d/g"), strict=True):
        assert told.startswith(f"cannot write '{name}' in {tmp_path}: {words}")
    assert (found["old"], found["left"], found["small"]) == ("old", ["d", "f"], "written")


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A directory that may be read by everybody and written to by nobody but root."""
    with tempfile.TemporaryDirectory() as directory:  # not tmp_path, which is closed to other users
        root = Path(directory) / "root"
        (root / "d").mkdir(parents=True)
        (root / "d" / "f").write_bytes(b"theirs")
        closed = (Path(directory), root, root / "d")
        for path in closed:
            path.chmod(0o555)
        yield root
        for path in closed:
            path.chmod(0o755)


def test_a_root_that_this_user_may_not_write_to(theirs: Path) -> None:
    """Found at the first write; root may write everywhere, so it becomes somebody else first."""
    root = theirs
    code = f"""
import shardrt_files.local
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
place = shardrt_files.make({str(root)!r})
told = []
for path in ("new", "d/f", "e/f"):
    try:
        place.publish(path, b"x")
    except CheckpointError as error:
        told.append(str(error))
try:
    place.remove("d/f")
except CheckpointError as error:
    told.append(str(error))
print(json.dumps({{"told": told, "list": place.list(), "read": place.read("d/f").decode()}}))
"""
    found = limited(code)
    fix = "Permission denied (EACCES); let the user of this process read and write there, or choose another place"
    assert found["told"] == [
        *(f"cannot create {path!r} in {root}: {fix}" for path in ("new", "d/f", "e/f")),
        f"cannot remove 'd/f' in {root}: {fix}",
    ]
    assert (found["list"], found["read"]) == (["d/"], "theirs")


def test_a_process_that_is_killed_leaves_nothing_that_counts(tmp_path: Path) -> None:
    code = f"""
import os, signal
place = shardrt_files.make({str(tmp_path)!r})
file = place.create("d/f")
file.write(bytes(100_000))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", LIMITED + code], capture_output=True, timeout=120, check=False)
    assert done.returncode == -9, done.stderr
    place = LocalPlace(tmp_path)
    assert (place.list("d"), len(list((tmp_path / "d").iterdir()))) == ([], 1)
    place.remove("d")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_done_cannot_be_written_to(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    for end in ("commit", "abandon"):
        file = place.create("f")
        getattr(file, end)()
        with pytest.raises(CheckpointError, match=r"'f' in .* is committed or abandoned and cannot be written to"):
            file.write(b"x")
        with pytest.raises(CheckpointError, match="cannot be committed"):
            file.commit()


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    place = shardrt_files.make(tmp_path)
    place.publish("d/f", b"x")
    before = count()
    for _ in range(5):
        place.publish("d/e/f", b"x")
        place.create("d/g").abandon()
        place.read("d/f")
        place.list("d")
        place.remove("d/e")
        for path in ("missing", "d", "d/f/g"):
            with pytest.raises((FileNotFoundError, CheckpointError)):
                place.read(path)
        with pytest.raises(CheckpointError):
            place.publish("d", b"x")
    assert count() == before

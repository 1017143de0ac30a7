"""A local directory as a place, by plain system calls."""

from __future__ import annotations

import builtins
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardrt_files.directories import open_below, opened, synchronise
from shardrt_files.faults import told
from shardrt_files.local_file import LocalFile
from shardrt_files.paths import parts_of
from shardrt_files.temporary import is_temporary


class LocalPlace:
    """Files in a directory and below; it is made when the first file is written.

    Bytes are read right into the caller's memory. See Note [Past the page cache], Note [Links are not followed] and
    Note [Durable names].

    Example:
        >>> from shardrt_files.local import LocalPlace
        >>> place = LocalPlace("runs")
        >>> file = place.create("step-1/rank0.bin")
        >>> file.write(b"0123456789")
        >>> place.list("step-1")
        []
        >>> file.commit()
        >>> buffer = bytearray(4)
        >>> place.read_into("step-1/rank0.bin", 8, memoryview(buffer)), bytes(buffer[:2])
        (2, b'89')
        >>> place.remove("step-1")
        >>> place.list()
        []
    """

    name = "files"

    def __init__(self, root: str | os.PathLike[str]) -> None:
        # Absolute, since the process may change its directory later.
        self._root = Path(root).absolute()
        self.root = str(self._root)

    def create(self, path: str) -> LocalFile:
        """Begin a file, with the directories it needs; it has its name once it is committed."""
        *above, _ = parts_of(path, self.root)
        with told("create", path, self.root), opened(self._root, above, create=True) as directory:
            return LocalFile(directory, path, self.root)

    def publish(self, path: str, data: bytes) -> None:
        """Write beside, synchronise, and put it in place of what had its name."""
        file = self.create(path)
        try:
            file.write(data)
            file.commit()
        finally:
            file.abandon()

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes ``[start, stop)``, cut where the file ends."""
        pieces = []
        with self._reading(path) as (file, size):
            # Never more than there is: the caller's numbers may come from a damaged file.
            remaining = (size if stop is None else min(stop, size)) - start
            while remaining > 0 and (piece := os.pread(file, remaining, start)):
                pieces.append(piece)
                start += len(piece)
                remaining -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        """Fill the caller's memory: the system writes right into it."""
        done = 0
        with self._reading(path) as (file, _):
            view = buffer.cast("B") if buffer.nbytes else memoryview(b"")
            while done < view.nbytes and (count := os.preadv(file, [view[done:]], start + done)):
                done += count
        return done

    def size(self, path: str) -> int:
        """Bytes of a file."""
        with self._reading(path) as (_, size):
            return size

    def list(self, path: str = "") -> builtins.list[str]:
        """Names in a directory, sorted; files that were never committed are not there."""
        parts = parts_of(path, self.root) if path else ()
        with told("list", path, self.root):
            try:
                with opened(self._root, parts) as directory, os.scandir(directory) as found:
                    return sorted(
                        entry.name + "/" * entry.is_dir(follow_symlinks=False)
                        for entry in found
                        if not is_temporary(entry.name)
                    )
            except FileNotFoundError:
                return []

    def remove(self, path: str) -> None:
        """Remove a file or a directory; a link goes, and what it leads to stays."""
        *above, name = parts_of(path, self.root)
        with told("remove", path, self.root), suppress(FileNotFoundError), opened(self._root, above) as directory:
            if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                _remove_tree(name, directory)
            else:
                os.unlink(name, dir_fd=directory)
            synchronise(directory)

    @contextmanager
    def _reading(self, path: str) -> Iterator[tuple[int, int]]:
        """A descriptor of a file, and the file's size."""
        *above, name = parts_of(path, self.root)
        with told("read", path, self.root, missing_passes=True):
            with opened(self._root, above) as directory:
                # Not blocking: opening a pipe would wait for its other end, perhaps for ever.
                file = open_below(directory, name, os.O_RDONLY | os.O_NONBLOCK)
            try:
                status = os.fstat(file)
                if stat.S_ISDIR(status.st_mode):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.EINVAL, "it is no regular file")
                yield file, status.st_size
            finally:
                os.close(file)


def _remove_tree(name: str, directory: int) -> None:
    """Remove a directory and what is in it, relative to open directories: links below are removed, not followed."""
    for _, directories, files, below in os.fwalk(name, topdown=False, onerror=_unless_gone, dir_fd=directory):
        for file in files:
            with suppress(FileNotFoundError):  # another rank may be removing the same
                os.unlink(file, dir_fd=below)
        for child in directories:
            with suppress(FileNotFoundError):
                try:
                    os.rmdir(child, dir_fd=below)
                except NotADirectoryError:  # fwalk counts a link to a directory as one
                    os.unlink(child, dir_fd=below)
    with suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=directory)


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error

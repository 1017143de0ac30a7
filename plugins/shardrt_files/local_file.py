"""A local file that is being written: under a temporary name, until it is whole and durable."""

from __future__ import annotations

import os
from contextlib import suppress

from shardrt.errors import CheckpointError
from shardrt_files.direct_writing import DirectWriter
from shardrt_files.directories import open_below, synchronise
from shardrt_files.faults import told
from shardrt_files.temporary import temporary_name


class LocalFile:
    """``commit`` gives the file its name. See Note [Past the page cache]."""

    def __init__(self, directory: int, path: str, root: str) -> None:
        self._is_open = False
        self._path = path
        self._root = root
        self._name = path.rpartition("/")[2]
        self._temporary = temporary_name()
        # A duplicate, since the caller closes theirs. The file stays relative to it, whatever happens to the path.
        self._directory = os.dup(directory)
        try:
            self._file = open_below(self._directory, self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except BaseException:
            os.close(self._directory)
            raise
        self._writer = DirectWriter(self._file)
        self._is_open = True

    def write(self, data: memoryview | bytes, /) -> None:
        """Append all of it."""
        self._check_open("written to")
        view = memoryview(data)
        if view.nbytes:
            with told("write", self._path, self._root):
                self._writer.write(view.cast("B"))

    def commit(self) -> None:
        """Synchronise the bytes, then give the file its name, then synchronise the name."""
        self._check_open("committed")
        try:
            with told("write", self._path, self._root):
                self._writer.flush()
                os.fsync(self._file)
                os.replace(self._temporary, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
                synchronise(self._directory)
        except BaseException:
            self.abandon()
            raise
        self._close()

    def abandon(self) -> None:
        """Remove what was written; after ``commit`` there is nothing to remove."""
        if self._is_open:
            with suppress(OSError):
                os.unlink(self._temporary, dir_fd=self._directory)
            self._close()

    def _check_open(self, what: str) -> None:
        if not self._is_open:
            raise CheckpointError(
                f"{self._path!r} in {self._root} is committed or abandoned and cannot be {what}; create it again"
            )

    def _close(self) -> None:
        self._is_open = False
        with suppress(OSError):  # the bytes are synchronised or given up: nothing depends on how closing ends
            os.close(self._file)
        os.close(self._directory)

    def __del__(self) -> None:
        # Forgotten by its owner, say in an error: nobody can commit it any more.
        if getattr(self, "_is_open", False):
            self.abandon()

"""A file that is being written through fsspec."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardrt.errors import CheckpointError
from shardrt_files.driver_faults import told_by_driver

if TYPE_CHECKING:
    from shardrt_files.writing import Writing


class RemoteFile:
    """Hands pieces to the driver's own buffer; see Note [Whole files elsewhere] for when it gets its name."""

    def __init__(self, writing: Writing, path: str, root: str) -> None:
        self._is_open = False
        self._writing = writing
        self._path = path
        self._root = root
        with told_by_driver("create", path, root):
            self._file: Any = writing.begin()
        self._is_open = True

    def write(self, data: memoryview | bytes, /) -> None:
        """Append all of it."""
        self._check_open("written to")
        view = memoryview(data)
        if view.nbytes:
            view = view.cast("B")
        with told_by_driver("write", self._path, self._root):
            while view.nbytes:
                # Files of fsspec say how many bytes they took, or nothing where they take all.
                taken = self._file.write(view)
                view = view[view.nbytes if taken is None else taken :]

    def commit(self) -> None:
        """Finish the upload: when this returns, the file has its name and all its bytes."""
        self._check_open("committed")
        try:
            with told_by_driver("write", self._path, self._root):
                self._writing.finish(self._file)
        except BaseException:
            self.abandon()
            raise
        self._is_open = False

    def abandon(self) -> None:
        """Give the upload up; after ``commit`` this does nothing."""
        if self._is_open:
            self._is_open = False
            with suppress(Exception):
                self._writing.give_up(self._file)

    def _check_open(self, what: str) -> None:
        if not self._is_open:
            raise CheckpointError(
                f"{self._path!r} in {self._root} is committed or abandoned and cannot be {what}; create it again"
            )

    def __del__(self) -> None:
        # Forgotten by its owner. Left alone, a file of fsspec would finish its upload when it is collected.
        if getattr(self, "_is_open", False):
            self.abandon()

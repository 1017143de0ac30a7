"""How a file gets its name on a file system of fsspec.

Note [Whole files elsewhere]: what is half written must not be found under its name. Object stores do that by
themselves: an object appears when its upload is finished, and a move would be a copy. Where a driver can rename, files
are written under a temporary name and renamed when they are whole. fsspec has no word for either kind, so a driver that
brings a ``mv`` of its own, instead of fsspec's copying and deleting, counts as one that renames. The dictionary of
``memory://`` shows files as they grow, and a copy in it is one assignment: it is treated like a rename.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from shardrt_files.temporary import temporary_name


class Writing(Protocol):
    """One file's way from its first byte to its name."""

    def begin(self) -> Any:
        """Open a file of fsspec for writing."""
        ...

    def finish(self, file: Any) -> None:
        """Close it, so that it is whole under its name."""
        ...

    def give_up(self, file: Any) -> None:
        """Close it, so that it is not."""
        ...


def writing_on(file_system: Any, path: str) -> Writing:
    """The way that fits the file system.

    Example:
        >>> import fsspec
        >>> from shardrt_files.writing import writing_on
        >>> type(writing_on(fsspec.filesystem("memory"), "/a")).__name__
        'WriteAsideAndMove'
    """
    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]
    from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

    if isinstance(file_system, MemoryFileSystem):
        return WriteAsideAndMove(file_system, path, move=_copy_and_delete)
    if type(file_system).mv is not AbstractFileSystem.mv:
        return WriteAsideAndMove(file_system, path, move=_rename)
    return WriteDirectly(file_system, path)


class WriteDirectly:
    """The store shows an object once it is uploaded."""

    def __init__(self, file_system: Any, path: str) -> None:
        self._fs = file_system
        self._path = path

    def begin(self) -> Any:
        """See :class:`Writing`, as for all that follow."""
        try:
            return self._fs.open(self._path, "wb")
        except FileNotFoundError:  # most stores need no directories
            make_parent(self._fs, self._path)
            return self._fs.open(self._path, "wb")

    def finish(self, file: Any) -> None:
        file.close()

    def give_up(self, file: Any) -> None:
        from fsspec.spec import AbstractBufferedFile  # type: ignore[import-untyped]

        if isinstance(file, AbstractBufferedFile):
            file.discard()
            file.closed = True  # closing would finish the upload
        else:
            file.close()
            self._fs.rm_file(self._path)


class WriteAsideAndMove:
    """A temporary name in the same directory, until the file is whole."""

    def __init__(self, file_system: Any, path: str, *, move: Callable[[Any, str, str], None]) -> None:
        self._fs = file_system
        self._path = path
        self._aside = f"{path.rpartition('/')[0]}/{temporary_name()}"
        self._move = move

    def begin(self) -> Any:
        """See :class:`Writing`, as for all that follow."""
        make_parent(self._fs, self._path)
        return self._fs.open(self._aside, "wb")

    def finish(self, file: Any) -> None:
        file.close()
        self._move(self._fs, self._aside, self._path)

    def give_up(self, file: Any) -> None:
        with suppress(Exception):
            file.close()
        self._fs.rm_file(self._aside)


def make_parent(file_system: Any, path: str) -> None:
    """Make the directories that a file needs."""
    file_system.makedirs(path.rpartition("/")[0], exist_ok=True)


def _copy_and_delete(file_system: Any, source: str, target: str) -> None:
    # Not mv, which takes stars and brackets in names for patterns.
    if file_system.isdir(target):
        raise IsADirectoryError(target)
    file_system.cp_file(source, target)
    file_system.rm_file(source)


def _rename(file_system: Any, source: str, target: str) -> None:
    try:
        file_system.mv(source, target)
    except Exception:
        # Some cannot rename onto a file that exists (SMB, HDFS). Then there is a moment without it, and the new one
        # is whole beside.
        if not file_system.isfile(target):
            raise
        file_system.rm_file(target)
        file_system.mv(source, target)

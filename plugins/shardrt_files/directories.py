"""Directories below a root, opened part by part.

Note [Links are not followed]: a path is checked as text, and then opened one part after the other, each relative to the
directory before and without following a symbolic link. So a link below the root leads nowhere, neither when a path is
checked nor if somebody puts one there a moment later: the whole path is never handed to the system at once. The root
itself is the user's word, and may be a link.

Note [Durable names]: a file that was synchronised may still have no name after a crash: names belong to directories,
which are synchronised on their own. A new directory is a name in its parent.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def opened(root: Path, parts: Sequence[str], *, create: bool = False) -> Iterator[int]:
    """A descriptor of the directory ``parts`` below the root; ``create`` makes what is missing, durably.

    Example:
        >>> import os
        >>> from pathlib import Path
        >>> from shardrt_files.directories import opened
        >>> with opened(Path.cwd(), ["a", "b"], create=True) as directory:
        ...     os.listdir(directory)
        []
    """
    if create:
        _make_root(root)
    descriptor = os.open(root, _DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            below = _open_directory(descriptor, part, create=create)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def open_below(directory: int, name: str, flags: int) -> int:
    """Open one name in a directory; a symbolic link is refused in words that say so."""
    try:
        return os.open(name, flags | _NO_LINK, 0o666, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(directory, name):
            raise OSError(
                errno.ELOOP, f"{name!r} is a symbolic link, and links below the root of a place are not followed"
            ) from None
        raise


def synchronise(directory: int) -> None:
    """Make the names in a directory durable: see Note [Durable names]."""
    try:
        os.fsync(directory)
    except OSError as error:
        # Some network file systems keep names durable themselves, and know no such call for directories.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


def _open_directory(above: int, name: str, *, create: bool) -> int:
    try:
        return open_below(above, name, _DIRECTORY)
    except FileNotFoundError:
        if not create:
            raise
    _make(name, above)
    return open_below(above, name, _DIRECTORY)


def _make(name: str, directory: int) -> None:
    with suppress(FileExistsError):  # another rank was first; what is no directory is found when it is opened
        os.mkdir(name, dir_fd=directory)
    synchronise(directory)


def _make_root(root: Path) -> None:
    absent = [path for path in (root, *root.parents) if not path.exists()]
    for path in reversed(absent):
        with opened(path.parent, ()) as parent:
            _make(path.name, parent)


def _is_link(directory: int, name: str) -> bool:
    with suppress(FileNotFoundError):
        return stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    return False

"""What the system says when it cannot, in words that tell which file and what helps."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from shardrt.errors import CheckpointError

_PERMISSION = "let the user of this process read and write there, or choose another place"
_NO_DIRECTORY = "something else stands where a directory is needed: move it away, or choose another place"

FIXES: Mapping[int, str] = {
    errno.ENOSPC: "free space there, or choose another place",
    errno.EDQUOT: "free space of this user's quota, or choose another place",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or choose a file system that takes larger files",
    errno.EROFS: "the file system is mounted read-only: remount it, or choose another place",
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.ENOTDIR: _NO_DIRECTORY,
    errno.EEXIST: _NO_DIRECTORY,
    errno.EISDIR: "a directory stands where a file is needed: move it away, or choose another place",
    errno.ELOOP: "copy or mount there what it leads to, or open the place that it leads to",
    errno.ENOTEMPTY: "somebody writes there at the same time: give each run a place of its own",
    errno.ENAMETOOLONG: "use shorter names",
    errno.EMFILE: "too many files are open: raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine: raise its limit",
    errno.EIO: "the device failed: check it (dmesg), and choose another place",
    errno.ESTALE: "the network file system was changed under this process: mount it again",
    errno.ENOENT: "somebody removed it at the same time: give each run a place of its own",
}
"""What helps, by the system's error number."""


@contextmanager
def told(doing: str, path: str, root: str, *, missing_passes: bool = False) -> Iterator[None]:
    """Turn the system's errors into :class:`~shardrt.errors.CheckpointError`; a file that is missing may pass.

    Example:
        >>> import errno
        >>> from shardrt_files.faults import told
        >>> with told("write", "a/b", "/runs"):
        ...     raise OSError(errno.EFBIG, "File too large")
        Traceback (most recent call last):
        ...
        shardrt.errors.CheckpointError: cannot write 'a/b' in /runs: File too large (EFBIG); raise the limit of ...
    """
    try:
        yield
    except FileNotFoundError as error:
        if not missing_passes:
            raise fault(doing, path, root, error) from error
        raise missing(path, root) from error
    except OSError as error:
        raise fault(doing, path, root, error) from error


def missing(path: str, root: str) -> FileNotFoundError:
    """The one error of the system that passes, with the whole path."""
    return FileNotFoundError(errno.ENOENT, "no such file", f"{root.rstrip('/')}/{path}")


def fault(doing: str, path: str, root: str, error: Exception) -> CheckpointError:
    """The error that tells what could not be done, the system's words, and what helps."""
    number = error.errno if isinstance(error, OSError) else None
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if not words:
        words = os.strerror(number) if number else "no reason was given"
    kind = errno.errorcode.get(number or 0, type(error).__name__)
    fix = FIXES.get(number or 0, "see what the system says")
    return CheckpointError(f"cannot {doing} {path!r} in {root}: {words} ({kind}); {fix}")

"""What a driver of fsspec says when it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardrt.errors import CheckpointError
from shardrt_files.faults import fault, missing


@contextmanager
def told_by_driver(doing: str, path: str, root: str, *, missing_passes: bool = False) -> Iterator[None]:
    """As for the system's errors, whatever class they are of: every driver has its own.

    Example:
        >>> from shardrt_files.driver_faults import told_by_driver
        >>> with told_by_driver("write", "a/b", "s3://runs"):
        ...     raise RuntimeError("bucket is gone")
        Traceback (most recent call last):
        ...
        shardrt.errors.CheckpointError: cannot write 'a/b' in s3://runs: bucket is gone (RuntimeError); see what the ...
    """
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        if not missing_passes:
            raise fault(doing, path, root, error) from error
        raise missing(path, root) from error
    except Exception as error:
        raise fault(doing, path, root, error) from error

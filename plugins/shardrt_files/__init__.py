"""Places on file systems: local directories by plain system calls, everything else through fsspec."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardrt.registry import PlaceRecord, hookimpl

if TYPE_CHECKING:
    from shardrt.protocols import Place

SHARDRT_HOOK_VERSION = "1.1"


def make(root: str | os.PathLike[str], **options: Any) -> Place:
    """A directory, ``file://...``, or an address that fsspec knows, with its ``storage_options``.

    Example:
        >>> import shardrt_files
        >>> place = shardrt_files.make("memory://runs/one")
        >>> place.publish("note.txt", b"hello")
        >>> place.list(), place.read("note.txt", 1, 3)
        (['note.txt'], b'el')
        >>> place.remove("note.txt")
    """
    from shardrt_files.addresses import open_place

    return open_place(root, **options)


@hookimpl
def shardrt_places() -> Iterable[PlaceRecord]:
    """One record: ``files``."""
    yield PlaceRecord(
        name="files", summary="local directories, and whatever fsspec reaches: s3://, gs://, sftp://, ...", factory=make
    )

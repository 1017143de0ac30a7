"""From what a user writes to a place: a path, ``file://``, or an address of another scheme."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from shardrt.errors import ConfigError
from shardrt.plan import refuse_unknown_options
from shardrt_files.local import LocalPlace

if TYPE_CHECKING:
    from shardrt.protocols import Place

_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)(::|://)")
_LOCAL = ("file", "local")


def open_place(
    root: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, **unknown: Any
) -> Place:
    """The place at an address; ``storage_options`` go to fsspec's file system.

    Example:
        >>> from shardrt_files.addresses import open_place
        >>> open_place("file:///tmp/my%20run").root
        '/tmp/my run'
        >>> open_place("memory://run").root
        'memory://run'
    """
    refuse_unknown_options("files", unknown, known=("storage_options",))
    address = os.fspath(root)
    if not isinstance(address, str) or not address or "\0" in address:
        raise ConfigError(f"a place is a directory or an address such as s3://bucket/runs, got {root!r}")
    if storage_options is not None and not (
        isinstance(storage_options, Mapping) and all(isinstance(key, str) for key in storage_options)
    ):
        raise ConfigError(f"storage_options of files is a mapping of fsspec's options, got {storage_options!r}")
    # A path object is a path, whatever it looks like.
    found = _SCHEME.match(address) if isinstance(root, str) else None
    if found is not None and found["scheme"].lower() not in _LOCAL:
        from shardrt_files.remote import FsspecPlace

        return FsspecPlace(address, storage_options or {})
    if storage_options:
        raise ConfigError(
            f"{address} is a local directory, and storage_options ({', '.join(storage_options)}) are for file systems "
            "of fsspec; leave them away, or give an address such as s3://bucket/runs"
        )
    return LocalPlace(address if found is None else _local_path(address))


def _local_path(address: str) -> Path:
    host, slash, path = address.partition("://")[2].partition("/")
    if host not in ("", "localhost") or not slash:
        raise ConfigError(f"{address} is no file on this machine; write file:///absolute/path, or the path alone")
    return Path(unquote(f"/{path}"))

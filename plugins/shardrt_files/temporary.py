"""Names of files that are being written, and do not count as there."""

from __future__ import annotations

import secrets

_PREFIX, _SUFFIX = ".shardrt-", ".partial"


def temporary_name() -> str:
    """A name for a file that has no name yet. Short, so that it fits wherever the final one does.

    Example:
        >>> from shardrt_files.temporary import is_temporary, temporary_name
        >>> is_temporary(temporary_name()), is_temporary("rank0.safetensors")
        (True, False)
    """
    return f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"


def is_temporary(name: str) -> bool:
    """Whether a file was never finished: listings leave it out, and it goes with its directory."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)

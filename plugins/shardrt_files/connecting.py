"""From an address to fsspec's file system, with errors that say what to install."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardrt.errors import ConfigError, UnsupportedError
from shardrt.plan.options import listed
from shardrt_files.faults import fault


def connect(address: str, storage_options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system behind an address, and what it calls the path in it.

    Example:
        >>> from shardrt_files.connecting import connect
        >>> connect("memory://run/1", {})[1]
        '/run/1'
        >>> connect("memoryy://run/1", {})
        Traceback (most recent call last):
        ...
        shardrt.errors.ConfigError: no file system for memoryy://run/1: fsspec does not know 'memoryy'; it knows: ...
    """
    import fsspec.core  # type: ignore[import-untyped]

    shown = without_password(address)
    scheme = re.split(r"://|::", address, maxsplit=1)[0]
    try:
        file_system, path = fsspec.core.url_to_fs(address, **storage_options)
    except ImportError as error:
        raise UnsupportedError(
            f"no file system for {shown}: its driver is not installed; pip install {_package(scheme, error)} ({error})"
        ) from error
    except (TypeError, ValueError) as error:
        if "not known" in str(error):
            known = listed("it knows", scheme, sorted(fsspec.available_protocols()))
            raise ConfigError(
                f"no file system for {shown}: fsspec does not know {scheme!r}; {known}; another one needs a package "
                "that registers it with fsspec"
            ) from error
        raise ConfigError(
            f"no file system for {shown} with storage_options {sorted(storage_options)}: {error}; see fsspec's "
            f"documentation of {scheme!r} for its options"
        ) from error
    except Exception as error:
        raise fault("connect to", scheme, shown, error) from error
    return file_system, str(path)


def without_password(address: str) -> str:
    """An address as messages and logs may show it.

    Example:
        >>> from shardrt_files.connecting import without_password
        >>> without_password("sftp://me:secret@host/runs")
        'sftp://me:***@host/runs'
    """
    return re.sub(r"(//[^/@:]*):[^/@]*@", r"\1:***@", address)


def _package(scheme: str, error: ImportError) -> str:
    from fsspec.registry import known_implementations  # type: ignore[import-untyped]

    package = str(known_implementations.get(scheme, {}).get("class", "")).partition(".")[0]
    if package not in ("", "fsspec"):
        return package
    cause = error.__cause__
    return (getattr(cause, "name", None) or f"the driver of {scheme}").partition(".")[0]

"""Functions and classes named so that another process finds them: ``module:qualified.name``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from shardrt.errors import ConfigError


def import_path(thing: Callable[..., Any] | type | str) -> str:
    """The path by which a worker can import a function or class.

    Example:
        >>> from shardrt.testing.functions import import_path
        >>> from shardrt import Plan
        >>> import_path(Plan.build)
        'shardrt.plan.plan:Plan.build'
    """
    if isinstance(thing, str):
        if ":" not in thing:
            raise ConfigError(f"a function is named 'module:qualname', got {thing!r}")
        return thing
    module = getattr(thing, "__module__", None)
    name = getattr(thing, "__qualname__", None)
    if module is None or name is None or module == "__main__" or "<" in name:
        where = "a lambda or a local one" if name and "<" in name else f"of module {module!r}"
        raise ConfigError(
            f"{name or thing!r} cannot be run on other ranks because it is {where}; "
            f"define it at the top of a module that can be imported"
        )
    return f"{module}:{name}"


def resolve(path: str) -> Any:
    """The thing at ``module:qualified.name``.

    Example:
        >>> from shardrt.testing.functions import resolve
        >>> resolve("os.path:basename")("a/b")
        'b'
    """
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found

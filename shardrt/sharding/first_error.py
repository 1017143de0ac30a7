"""The first error of a forward is the one that users see.

torch calls some hooks also when a forward has raised, and where such a hook raises too, warns at length. What a hook of
ours cannot do then (bring in a gather of a peer that is gone) follows from the first error, which is on its way.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from shardrt.errors import ShardrtError


def has_failed(output: Any) -> bool:
    """Whether a hook that runs after a forward with this output runs because it has raised.

    Such a forward has no output, and is being handled while the hook runs.

    Example:
        >>> from shardrt.sharding.first_error import has_failed
        >>> has_failed(None)
        False
    """
    return output is None and sys.exc_info()[0] is not None


def quiet_after_failure(hook: Callable[..., None]) -> Callable[..., None]:
    """The same hook of a module's forward, whose own errors are dropped where that forward has raised.

    Example:
        >>> from shardrt.errors import StateError
        >>> from shardrt.sharding.first_error import quiet_after_failure
        >>> def hook(module, args, output):
        ...     raise StateError("of the hook")
        >>> try:
        ...     raise ValueError("of the forward")
        ... except ValueError:
        ...     quiet_after_failure(hook)(None, (), None)
        >>> quiet_after_failure(hook)(None, (), None)
        Traceback (most recent call last):
        shardrt.errors.StateError: of the hook
    """

    @functools.wraps(hook)
    def run(module: Any, args: tuple[Any, ...], output: Any) -> None:
        failed = has_failed(output)
        try:
            hook(module, args, output)
        except ShardrtError:
            if not failed:
                raise

    return run

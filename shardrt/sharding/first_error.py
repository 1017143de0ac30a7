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
        # A forward that has raised has no output, and is being handled while this runs.
        has_failed = output is None and sys.exc_info()[0] is not None
        try:
            hook(module, args, output)
        except ShardrtError:
            if not has_failed:
                raise

    return run

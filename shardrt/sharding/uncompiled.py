"""Hooks that torch.compile leaves alone.

Note [Hooks are not compiled]: gathers and the memory that comes and goes are nothing a compiler may trace, reorder or
leave out. A hook that is marked makes it end one graph before and begin another after it, so that each unit's forward
is compiled by itself and finds its parameters in place. torch's own mark imports the compiler, which costs seconds and
memory in processes that never compile; so
what it does is done here by the two switches behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The same hook, never traced and never compiled. See Note [Hooks are not compiled].

    Example:
        >>> from shardrt.sharding.uncompiled import uncompiled
        >>> uncompiled(lambda x: x + 1)(1)
        2
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs)

    functools.update_wrapper(run, hook)
    run._torchdynamo_disable = True  # type: ignore[attr-defined] # for a caller that is being traced
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP  # for one that is not: neither this is compiled nor what it calls
    frames.set_code_exec_strategy(run.__code__, frames._FrameExecStrategy(skip, skip))
    return run

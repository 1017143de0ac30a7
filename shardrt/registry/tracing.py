"""``SHARDRT_TRACE_HOOKS=1``: one line on stderr for each hook call."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pluggy

from shardrt.registry.records import Record

_LONGEST = 160


def trace_hook_calls(manager: pluggy.PluginManager) -> None:
    """Print every hook call of the manager with its plugins, arguments and result.

    Example:
        >>> import contextlib, sys, pluggy, shardrt
        >>> from shardrt.registry import hookspecs
        >>> from shardrt.registry.tracing import trace_hook_calls
        >>> class Plugin:
        ...     @shardrt.hookimpl
        ...     def shardrt_rank_failed(self, rank):
        ...         return rank
        >>> manager = pluggy.PluginManager("shardrt")
        >>> manager.add_hookspecs(hookspecs)
        >>> _ = manager.register(Plugin(), name="watcher")
        >>> trace_hook_calls(manager)
        >>> with contextlib.redirect_stderr(sys.stdout):
        ...     _ = manager.hook.shardrt_rank_failed(runtime=None, rank=2, error="lost")
        shardrt hook shardrt_rank_failed(runtime=None, rank=2, error='lost') plugins: watcher -> [2]
    """
    manager.add_hookcall_monitoring(_before, _after)


def _before(name: str, implementations: Sequence[pluggy.HookImpl], arguments: Mapping[str, Any]) -> None:
    # The line is printed afterwards, when the result is known; pluggy wants both functions.
    return


def _after(
    outcome: pluggy.Result[Any],
    name: str,
    implementations: Sequence[pluggy.HookImpl],
    arguments: Mapping[str, Any],
) -> None:
    _exhaust_generators(outcome)
    told = ", ".join(f"{argument}={_brief(value)}" for argument, value in arguments.items())
    # pluggy keeps implementations in the reverse of the order in which it calls them.
    plugins = ", ".join(implementation.plugin_name for implementation in reversed(implementations)) or "none"
    error = outcome.exception
    result = _brief(outcome.get_result()) if error is None else f"raised {type(error).__name__}: {error}"
    print(f"shardrt hook {name}({told}) plugins: {plugins} -> {result}", file=sys.stderr)  # noqa: T201


def _exhaust_generators(outcome: pluggy.Result[Any]) -> None:
    """Registration hooks yield: run them to their end now, since a generator's repr says nothing."""
    if outcome.exception is not None:
        return
    try:
        outcome.force_result([list(one) if isinstance(one, Iterator) else one for one in outcome.get_result()])
    except Exception as error:
        outcome.force_exception(error)


def _brief(value: object) -> str:
    if isinstance(value, Record):
        return f"{type(value).__name__} {'/'.join(value.key)}"
    if isinstance(value, list):
        return f"[{', '.join(_brief(item) for item in value)}]"
    try:
        text = repr(value).replace("\n", " ")
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."

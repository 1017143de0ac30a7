"""What plugins declare that they cannot do, collected while their conformance runs and told at the end."""

from __future__ import annotations

_declared: dict[str, set[str]] = {}


def record(plugin: str, what: str) -> None:
    """Note something that ``plugin`` declares unsupported and that was therefore not run as a success case.

    Example:
        >>> from shardrt.testing.conformance import declared
        >>> declared.record("carrier-pigeon", "float64 in all_reduce")
        >>> [line.split(maxsplit=1) for line in declared.table() if "pigeon" in line]
        [['carrier-pigeon', 'float64 in all_reduce']]
        >>> declared.forget("carrier-pigeon")
    """
    _declared.setdefault(plugin, set()).add(what)


def forget(plugin: str) -> None:
    """Drop what was noted about one plugin."""
    _declared.pop(plugin, None)


def table() -> list[str]:
    """One line per plugin and thing, sorted; empty when nothing was declared."""
    width = max((len(plugin) for plugin in _declared), default=0)
    return [f"{plugin:<{width}}  {what}" for plugin in sorted(_declared) for what in sorted(_declared[plugin])]

"""Options of partitioners come from configuration files and command lines: what is misspelt is said, with its like."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from shardrt.errors import ConfigError


def refuse_unknown_options(owner: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise :class:`~shardrt.errors.ConfigError` for an option that ``owner`` does not have.

    Example:
        >>> from shardrt.plan.options import refuse_unknown_options
        >>> refuse_unknown_options("flat", {"aling": 64}, known=["align"])
        Traceback (most recent call last):
        ...
        shardrt.errors.ConfigError: unknown option 'aling' of flat; its options: align; did you mean 'align'?
    """
    for option in options:
        if option not in known:
            raise ConfigError(f"unknown option {option!r} of {owner}; {listed('its options', option, known)}")


def refuse_unknown_choice(what: str, value: object, known: Collection[str]) -> None:
    """Raise :class:`~shardrt.errors.ConfigError` unless ``value`` is one of the known words.

    Example:
        >>> from shardrt.plan.options import refuse_unknown_choice
        >>> refuse_unknown_choice("cost of greedy", "byte", known=["bytes", "matrix"])
        Traceback (most recent call last):
        ...
        shardrt.errors.ConfigError: unknown cost of greedy 'byte'; there is: bytes, matrix; did you mean 'bytes'?
    """
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"unknown {what} {value!r}; {listed('there is', value, known)}")


def listed(title: str, got: object, known: Collection[str]) -> str:
    """The known words behind a title, and the one that was probably meant."""
    near = difflib.get_close_matches(str(got), known, n=1)
    return f"{title}: {', '.join(known)}" + (f"; did you mean {near[0]!r}?" if near else "")

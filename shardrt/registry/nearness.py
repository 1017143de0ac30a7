"""The nearest of the names that exist, for messages about one that does not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(got: object, known: Iterable[str]) -> str:
    """A clause to append to a message, empty where nothing is near.

    Example:
        >>> from shardrt.registry.nearness import did_you_mean
        >>> did_you_mean("glo", ["gloo", "nccl"])
        "; did you mean 'gloo'?"
        >>> did_you_mean("mpi", ["gloo", "nccl"])
        ''
    """
    near = difflib.get_close_matches(str(got).lower(), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def listed(names: Iterable[str]) -> str:
    """Names for a sentence, in alphabetical order.

    Example:
        >>> from shardrt.registry.nearness import listed
        >>> listed(["b", "a", "b"]), listed([])
        ('a, b', 'none')
    """
    return ", ".join(sorted(set(names))) or "none"

"""Ranks of one level by the numbers that they have among all ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence

_RANKS = re.compile(r"\b(ranks?) ([0-9]+(?:(?:, | and | to )[0-9]+)*)\b")


def with_ranks(words: str, ranks: Sequence[int]) -> str:
    """A level's words, in which its rank ``i`` is ``ranks[i]``. Numbers that are no rank of the level stay.

    Example:
        >>> from shardrt_hosts.naming import with_ranks
        >>> with_ranks("rank 1: all_gather (number 0) with rank 0 took too long; ranks 0, 1 are stuck", [1, 3])
        'rank 3: all_gather (number 0) with rank 1 took too long; ranks 1, 3 are stuck'
        >>> with_ranks("rank 7 has ended", [1, 3])
        'rank 7 has ended'
    """

    def number(found: re.Match[str]) -> str:
        rank = int(found[0])
        return str(ranks[rank]) if rank < len(ranks) else found[0]

    return _RANKS.sub(lambda found: f"{found[1]} {re.sub('[0-9]+', number, found[2])}", words)

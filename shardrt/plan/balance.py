"""Whole things onto ranks, largest first: the rule that whole-parameter and whole-bucket partitioners share."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from shardrt.errors import ConfigError


def starting_loads(world_size: int, load: Sequence[int] = ()) -> list[int]:
    """What each rank owns before planning starts, checked; an empty ``load`` means nothing yet.

    Example:
        >>> from shardrt.plan import starting_loads
        >>> starting_loads(3)
        [0, 0, 0]
    """
    if world_size < 1:
        raise ConfigError(f"a partition needs at least one rank, got world_size={world_size}")
    if not load:
        return [0] * world_size
    if len(load) != world_size:
        raise ConfigError(f"load has {len(load)} entries for {world_size} ranks; give one per rank, or none")
    if min(load) < 0:
        raise ConfigError(f"load must not be negative, rank {load.index(min(load))} has {min(load)}")
    return list(load)


def spread_largest_first(
    sizes: Sequence[int], loads: Sequence[int], *, preferred: Sequence[int] | None = None
) -> list[int]:
    """The rank of each item: the largest item left goes to the rank with the smallest load, until none is left.

    Items of one size are taken in the order given. Ranks of one load are taken by ascending ``preferred`` value (by
    default all alike) and then by number. Takes ``(items + ranks) * log(ranks)`` comparisons; the fullest rank ends
    at no more than 4/3 of the best there is when it starts empty.

    Example:
        >>> from shardrt.plan import spread_largest_first
        >>> spread_largest_first([2, 7, 4, 3], loads=[0, 0])
        [0, 0, 1, 1]
    """
    ranks = len(loads)
    by_preference = sorted(range(ranks), key=preferred.__getitem__) if preferred is not None else range(ranks)
    # A load and its rank's place make one integer: comparing those takes half the time of comparing tuples.
    heap = [loads[rank] * ranks + place for place, rank in enumerate(by_preference)]
    heapq.heapify(heap)
    owners = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):  # stable, reversed or not
        lightest = heap[0]
        owners[item] = by_preference[lightest % ranks]
        heapq.heapreplace(heap, lightest + sizes[item] * ranks)
    return owners

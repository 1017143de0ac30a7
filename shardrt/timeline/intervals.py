"""Arithmetic on stretches of time. A *set* here is a sorted list of half-open stretches that do not touch."""

from __future__ import annotations

from collections.abc import Iterable

Stretch = tuple[int, int]


def union(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The set that any stretches cover, in any order and however they overlap.

    Example:
        >>> from shardrt.timeline.intervals import union
        >>> union([(5, 7), (0, 2), (1, 3), (3, 4), (6, 6)])
        [(0, 4), (5, 7)]
    """
    merged: list[Stretch] = []
    for start, end in sorted(stretches):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(ones: list[Stretch], others: list[Stretch]) -> list[Stretch]:
    """What is in both sets.

    Example:
        >>> from shardrt.timeline.intervals import intersection
        >>> intersection([(0, 4), (6, 9)], [(3, 7)])
        [(3, 4), (6, 7)]
    """
    found: list[Stretch] = []
    one = other = 0
    while one < len(ones) and other < len(others):
        start = max(ones[one][0], others[other][0])
        end = min(ones[one][1], others[other][1])
        if start < end:
            found.append((start, end))
        if ones[one][1] <= others[other][1]:
            one += 1
        else:
            other += 1
    return found


def difference(ones: list[Stretch], others: list[Stretch]) -> list[Stretch]:
    """What is in the first set and not in the second.

    Example:
        >>> from shardrt.timeline.intervals import difference
        >>> difference([(0, 9)], [(2, 3), (5, 12)])
        [(0, 2), (3, 5)]
    """
    found: list[Stretch] = []
    index = 0
    for start, end in ones:
        while index < len(others) and others[index][1] <= start:
            index += 1
        at = index
        while at < len(others) and others[at][0] < end:
            if start < others[at][0]:
                found.append((start, others[at][0]))
            start = max(start, others[at][1])
            at += 1
        if start < end:
            found.append((start, end))
    return found


def length(stretches: list[Stretch]) -> int:
    """How much time a set covers.

    Example:
        >>> from shardrt.timeline.intervals import length
        >>> length([(0, 2), (3, 7)])
        6
    """
    return sum(end - start for start, end in stretches)


def lengths_within(stretches: list[Stretch], windows: list[Stretch]) -> list[int]:
    """How much of a set lies in each of some windows, which are in order and do not overlap.

    Example:
        >>> from shardrt.timeline.intervals import lengths_within
        >>> lengths_within([(0, 4), (6, 9)], [(0, 3), (3, 7), (20, 30)])
        [3, 2, 0]
    """
    found = []
    index = 0
    for start, end in windows:
        while index < len(stretches) and stretches[index][1] <= start:
            index += 1
        covered, at = 0, index
        while at < len(stretches) and stretches[at][0] < end:
            covered += min(end, stretches[at][1]) - max(start, stretches[at][0])
            at += 1
        found.append(covered)
    return found

"""Interval arithmetic beside an obvious twin: sets of whole moments."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardrt.timeline.intervals import Stretch, difference, intersection, length, lengths_within, union

STRETCHES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def moments(stretches: list[Stretch]) -> set[int]:
    return {moment for start, end in stretches for moment in range(start, end)}


def is_a_set(stretches: list[Stretch]) -> bool:
    """In order, none empty, and none touching the next."""
    edges = [edge for stretch in stretches for edge in stretch]
    return all(one < other for one, other in pairwise(edges))


@given(STRETCHES)
def test_union(stretches: list[Stretch]) -> None:
    found = union(stretches)
    assert is_a_set(found) and moments(found) == moments(stretches)
    assert length(found) == len(moments(stretches))


@given(STRETCHES, STRETCHES)
def test_intersection_and_difference(ones: list[Stretch], others: list[Stretch]) -> None:
    one, other = union(ones), union(others)
    assert moments(intersection(one, other)) == moments(one) & moments(other)
    assert moments(difference(one, other)) == moments(one) - moments(other)
    assert is_a_set(intersection(one, other)) and is_a_set(difference(one, other))


@given(STRETCHES, st.lists(st.integers(0, 45), unique=True, max_size=8), st.integers(1, 2))
def test_lengths_within_windows(stretches: list[Stretch], edges: list[int], every: int) -> None:
    windows = list(pairwise(sorted(edges)))[::every]  # side by side, or with gaps
    found = lengths_within(union(stretches), windows)
    assert found == [len(moments(stretches) & moments([window])) for window in windows]

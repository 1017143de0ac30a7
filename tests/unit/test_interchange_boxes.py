"""Ranges of a tensor from boxes: equal to what slicing the whole gives, whatever the boxes are."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardrt.errors import CheckpointError
from shardrt.interchange.boxes import Box, check_boxes, lazy_boxes, wanted_boxes

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def grid(shape: tuple[int, ...], cuts: list[list[int]], array: Any) -> list[Box]:
    """The boxes of a tensor that is cut along each dim."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size, at in zip(shape, cuts, strict=True):
        edges = sorted({0, size, *(cut % (size + 1) for cut in at)})
        spans = list(itertools.pairwise(edges))
        boxes = [((*o, begin), (*s, end - begin)) for o, s in boxes for begin, end in spans]
    made = []
    for offsets, sizes in boxes:
        part = array[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        made.append(Box(offsets=offsets, sizes=sizes, open=lambda part=part: part))
    return made


@given(shape=SHAPES, data=st.data())
def test_a_range_of_boxes_is_the_range_of_the_whole(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    whole = torch.arange(numel, dtype=torch.int32).reshape(shape)
    cuts = [data.draw(st.lists(st.integers(0, 5), max_size=2)) for _ in shape]
    boxes = grid(shape, cuts, whole.numpy().view("u4"))
    check_boxes(shape, boxes, where="t")
    lazy = lazy_boxes("int32", shape, data.draw(st.permutations(boxes)))
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    assert lazy.read(start, stop).tolist() == list(range(start, stop))
    assert torch.equal(lazy.whole(), whole)


@given(shape=SHAPES, data=st.data())
def test_wanted_boxes_are_few(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, math.prod(shape)))
    stop = data.draw(st.integers(start, math.prod(shape)))
    found = list(wanted_boxes(shape, start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert sum(math.prod(sizes) for _, sizes in found) == stop - start


def test_a_box_that_is_not_wanted_is_not_opened() -> None:
    def fail() -> Any:
        raise AssertionError("opened")

    here = Box(offsets=(0,), sizes=(2,), open=lambda: np.array([1, 2], "u1"))
    lazy = lazy_boxes("uint8", (4,), [here, Box(offsets=(2,), sizes=(2,), open=fail)])
    assert lazy.read(0, 2).tolist() == [1, 2]
    with pytest.raises(AssertionError, match="opened"):
        lazy.read(1, 3)


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (3, 3))], "leaves the tensor"),
        ([((-1, 0), (5, 3))], "leaves the tensor"),
        ([((0, 0), (4, -3))], "leaves the tensor"),
        ([((0,), (4,))], "in a tensor of shape"),
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], "overlap"),
        ([((0, 0), (4, 2)), ((2, 1), (2, 2))], "overlap"),
        ([((0, 0), (2, 3)), ((0, 0), (2, 3))], "overlap"),
        ([((0, 0), (2, 3))], "6 elements of 12"),
        ([], "0 elements of 12"),
    ],
)
def test_boxes_that_do_not_cover_once_are_refused(boxes: list[Any], said: str) -> None:
    made = [Box(offsets=offsets, sizes=sizes, open=lambda: np.empty(0)) for offsets, sizes in boxes]
    with pytest.raises(CheckpointError, match=said):
        check_boxes((4, 3), made, where="t")

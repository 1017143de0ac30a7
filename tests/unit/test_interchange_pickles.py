"""Pickles read as inert data: nothing runs, and whatever they say is bounded."""

from __future__ import annotations

import collections
import contextlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardrt.errors import CheckpointError
from shardrt.interchange.inert_pickle import Pairs, Record, read_inert, told
from tests.doubles.states import Canary

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.tuples(inner, inner, inner, inner)
        | st.tuples(inner)
        | st.just(())
    ),
    max_leaves=12,
)


def plain(value: Any) -> Any:
    """A value that must hold nothing but plain ones, with its dicts as dicts."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    if isinstance(value, Pairs):
        return {key: plain(each) for key, each in value.pairs}
    assert value is None or isinstance(value, (bool, int, float, str, bytes))
    return value


@given(value=PLAIN, protocol=st.sampled_from([3, 4, 5]))
def test_plain_values_are_what_unpickling_gives(value: Any, protocol: int) -> None:
    assert plain(read_inert(pickle.dumps(value, protocol), where="a file")) == value


def test_calls_and_items_of_objects_are_kept_apart() -> None:
    ordered = read_inert(pickle.dumps(collections.OrderedDict(a=1)), where="a file")
    assert ordered.is_a("collections.OrderedDict") and ordered.items.pairs == [("a", 1)]
    size = read_inert(pickle.dumps(torch.Size([2, 3])), where="a file")
    assert size.is_a("torch.Size") and size.args == ((2, 3),)


def test_shared_and_cyclic_values_are_shared_and_cyclic() -> None:
    shared = [1]
    one, other = read_inert(pickle.dumps([shared, shared]), where="a file")
    assert one is other
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    found = read_inert(pickle.dumps(cyclic), where="a file")
    assert found[0] is found


def test_a_short_pickle_that_means_very_much_costs_little() -> None:
    """As a key of a dict it would be hashed, which would not end."""
    laughs: Any = ("ha",)
    for _ in range(60):
        laughs = (laughs,) * 10
    data = b"\x80\x04}" + pickle.dumps(laughs, 3)[2:-1] + b"K\x01s."
    assert len(data) < 4000
    [(key, value)] = read_inert(data, where="a file").pairs
    assert (told(key), value) == ("a tuple", 1)


def test_large_and_deep_values_are_told_in_short() -> None:
    assert told(read_inert(pickle.dumps(10**5000), where="a file")) == f"a number of {(10**5000).bit_length()} bits"
    deep = b"\x80\x04K\x01" + b")R" * 100_000 + b"."
    assert told(read_inert(deep, where="a file")) == "an object"
    assert len(told("x" * 10_000)) < 120


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_nothing_in_a_pickle_runs(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps({"weights": Canary(tmp_path / "ran")}, protocol)
    if protocol == 0:
        with pytest.raises(CheckpointError, match="opcode"):  # nobody writes it any more
            read_inert(data, where="a file")
    else:
        [(_, found)] = read_inert(data, where="a file").pairs
        assert isinstance(found, Record)
    assert not (tmp_path / "ran").exists()
    pickle.loads(data)
    assert (tmp_path / "ran").exists(), "the canary must be able to sing"


def test_a_call_is_a_record_of_what_would_have_been_called(tmp_path: Path) -> None:
    found = read_inert(pickle.dumps(Canary(tmp_path)), where="a file")
    assert isinstance(found, Record) and found.is_a("posix.mkdir") and found.args == (str(tmp_path),)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a pickle"),
        (b"hello there", "not a pickle|opcode"),
        (pickle.dumps([1, 2, 3])[:-1], "not a pickle|cut off"),
        (b"\x80\x04.", "not a pickle"),
        (b"\x80\x04K\x01K\x02.", "leaves values behind"),
        (b"\x80\x04(.", "mark"),
        (b"\x80\x04K\x01t.", "lacks a mark|not a pickle"),
        (b"\x80\x04h\x07.", "not a pickle"),
        (b"\x80\x04}K\x01a.", "appends to a dict"),
        (b"\x80\x04]K\x01K\x02s.", "sets items of a list"),
        (b"\x80\x04]}b.", "gives a state to a list"),
        (b"\x80\x04K\x01K\x02R.", "calls 1 with 2"),
        (b"\x80\x04K\x01K\x02\x93.", "names a global by 1 and 2"),
        (b"\x80\x04\x8f.", "opcode EMPTY_SET"),
        (b"\x80\x04\x8a\xff.", "not a pickle"),
        (b"\x80\x04X\xff\xff\xff\x7fa.", "not a pickle"),
        (b"I" + b"9" * 10000 + b"\n.", "not a pickle|opcode"),
    ],
)
def test_what_is_no_pickle_is_an_error_of_ours(data: bytes, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_inert(data, where="a file")


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_error_of_ours(data: bytes) -> None:
    with contextlib.suppress(CheckpointError):
        assert len(told(read_inert(b"\x80\x04" + data, where="a file"))) < 500

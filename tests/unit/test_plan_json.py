"""Plans come from files and from other ranks: whatever is wrong with them is a PlanError that says where."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrt import Bucket, ParamSpec, Partition, Plan
from shardrt.errors import PlanError
from tests.unit.test_plan import example_plan

Path = tuple[Any, ...]
JUNK = [None, True, -1, 1.5, "x", [], {}, [[]], 10**30]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """The way to every value inside a document."""
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def at(document: Any, path: Path) -> Any:
    for key in path:
        document = document[key]
    return document


PLAN = example_plan().to_json()
PLACES = list(places(PLAN))


def test_round_trip_through_text() -> None:
    plan = Plan.from_json(json.loads(json.dumps(PLAN)))
    assert plan == example_plan()
    assert plan.fingerprint == example_plan().fingerprint


@pytest.mark.parametrize("path", PLACES, ids=lambda path: "/".join(map(str, path)))
def test_anything_missing_is_a_plan_error(path: Path) -> None:
    document = copy.deepcopy(PLAN)
    del at(document, path[:-1])[path[-1]]
    if path == ("params", 4, "shape", 1):  # (0, 3) without its last dim has no elements either
        assert Plan.from_json(document).params[4].shape == (0,)
    else:
        with pytest.raises(PlanError):
            Plan.from_json(document)


@given(st.sampled_from(PLACES), st.sampled_from(JUNK))
def test_anything_replaced_by_junk_is_a_plan_error_or_a_plan_that_stays_what_it_says(path: Path, junk: Any) -> None:
    document = copy.deepcopy(PLAN)
    at(document, path[:-1])[path[-1]] = junk
    try:
        plan = Plan.from_json(document)
    except PlanError:
        return
    assert json.loads(json.dumps(plan.to_json())) == document


@pytest.mark.parametrize("read", [ParamSpec.from_json, Partition.from_json, Bucket.from_json, Plan.from_json])
@given(data=json_values)
def test_anything_else_is_a_plan_error(read: Callable[[Any], object], data: Any) -> None:
    with pytest.raises(PlanError):
        read(data)


@pytest.mark.parametrize(
    ("read", "data", "message"),
    [
        (ParamSpec.from_json, {"shape": [1]}, "parameter has no 'name'; its keys: shape"),
        (
            ParamSpec.from_json,
            {"name": "w", "shape": [2, -1]},
            r"'shape' of parameter 'w' must be a list of sizes from 0 up, got \[2, -1\]",
        ),
        (ParamSpec.from_json, {"name": "w", "shape": [True]}, "list of sizes"),
        (ParamSpec.from_json, {"name": "w", "shape": [1], "dtype": "float7"}, "dtype 'float7'; known dtypes: bool"),
        (
            ParamSpec.from_json,
            {"name": "w", "shape": [1], "dtype": "int8", "trainable": 1},
            "'trainable' of parameter 'w' must be true or false, got 1",
        ),
        (
            ParamSpec.from_json,
            {"name": "w", "shape": [1], "dtype": "int8", "trainable": True, "group": False},
            "'group' of parameter 'w' must be a whole number from 0 up, got False",
        ),
        (Partition.from_json, {"world_size": 0, "shards": []}, "'world_size' of partition .* from 1 up, got 0"),
        (Partition.from_json, {"world_size": 1, "shards": "none"}, "'shards' of partition must be a list, got 'none'"),
        (Partition.from_json, {"world_size": 1, "shards": [["w", 0, 1]]}, r"must be \[param, start, stop, rank\]"),
        (Partition.from_json, {"world_size": 1, "shards": [["w", 0, True, 0]]}, "a name and three numbers"),
        (Partition.from_json, {"world_size": 1, "shards": [["w", 0, 1, 1]]}, "rank < 1"),
        (Partition.from_json, {"world_size": 1, "shards": [["w", 3, 1, 0]]}, "start <= stop"),
        (Bucket.from_json, {"dtype": "float7"}, "a bucket has dtype 'float7'"),
        (Plan.from_json, [], "plan must be a mapping"),
        (Plan.from_json, {"format": 99}, "plan format 99 cannot be read; this version of shardrt reads format 1"),
        (Plan.from_json, {"format": True}, "plan format True cannot be read"),
    ],
)
def test_messages_say_what_is_wrong(read: Callable[[Any], object], data: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read(data)


class TestBucketsMustFitThePartition:
    def damaged(self, change: Callable[[list[dict[str, Any]]], object]) -> dict[str, Any]:
        document = copy.deepcopy(PLAN)
        change(document["buckets"])
        return document

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda buckets: buckets.pop(), "2 trained shards travel in no bucket, one of parameter 'embed'"),
            (lambda buckets: buckets.append(buckets[0]), "bucket 3 holds .*which came before"),
            (lambda buckets: buckets.append({**buckets[0], "shards": []}), "bucket 3 holds nothing"),
            (lambda buckets: buckets[1].update(world_size=4), "bucket 1 is for 4 ranks, the partition for 3"),
            (lambda buckets: buckets[1].update(dtype="int8"), "bucket 1 is of int8 and holds 'norm' of bfloat16"),
            (lambda buckets: buckets[2]["shards"].reverse(), "bucket 2 is not ordered by owner"),
            (lambda buckets: buckets[0]["shards"].append(["frozen", 0, 20, 0]), "which no trained parameter has"),
        ],
    )
    def test_or_are_refused(self, change: Callable[[list[dict[str, Any]]], object], message: str) -> None:
        with pytest.raises(PlanError, match=message):
            Plan.from_json(self.damaged(change))

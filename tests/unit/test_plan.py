"""Partitions, buckets and plans: what they check, hold, say and store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fnmatch import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrt import Bucket, ParamSpec, Partition, Plan, Shard
from shardrt.errors import ConfigError, PlanError
from shardrt.plan import EvenCutter, build_buckets, group_for_travel, spread_largest_first


def spec(name: str, *shape: int, dtype: str = "float32", trainable: bool = True) -> ParamSpec:
    return ParamSpec(name=name, shape=shape, dtype=dtype, trainable=trainable)


PARAMS = (
    spec("embed", 50, 8),
    spec("norm", 8, dtype="bfloat16"),
    spec("frozen", 20, trainable=False),
    spec("scale"),
    spec("empty", 0, 3),
    spec("head", 8, 50),
)
PARTITION = Partition(
    world_size=3,
    shards=(
        Shard("embed", 0, 150, 0),
        Shard("embed", 150, 400, 1),
        Shard("norm", 0, 8, 1),
        Shard("frozen", 0, 20, 0),
        Shard("scale", 0, 1, 1),
        Shard("empty", 0, 0, 1),
        Shard("head", 0, 100, 1),
        Shard("head", 100, 400, 0),
    ),
)


def example_plan() -> Plan:
    return Plan.build(PARAMS, PARTITION, partitioner="by hand", bucket_bytes=1700)


class TestPartition:
    def test_knows_what_each_rank_and_parameter_has(self) -> None:
        assert [shard.param for shard in PARTITION.owned_by(1)] == ["embed", "norm", "scale", "empty", "head"]
        assert PARTITION.owned_by(2) == ()
        assert PARTITION.by_param["head"] == (Shard("head", 0, 100, 1), Shard("head", 100, 400, 0))

    @pytest.mark.parametrize(
        ("shards", "message"),
        [
            ([], "'w' .10 elements. has no owner"),
            ([Shard("w", 0, 5, 0), Shard("w", 6, 10, 1)], "leave a gap.*element 5, found .6, 10. on rank 1"),
            ([Shard("w", 0, 5, 0), Shard("w", 4, 10, 1)], "overlap"),
            ([Shard("w", 5, 10, 0), Shard("w", 0, 5, 1)], "leave a gap"),
            ([Shard("w", 0, 5, 0), Shard("w", 5, 3, 1)], "found .5, 3."),
            ([Shard("w", 0, 9, 0)], "end at element 9; it has 10"),
            ([Shard("w", 0, 11, 0)], "end at element 11; it has 10"),
            ([Shard("w", 0, 10, 2)], "rank 2; the world has 2 ranks"),
            ([Shard("w", 0, 10, -1)], "rank -1"),
            ([Shard("w", 0, 10, 0), Shard("v", 0, 1, 0)], "unknown parameters: 'v'"),
        ],
    )
    def test_refuses_what_does_not_cover_every_element_once(self, shards: list[Shard], message: str) -> None:
        with pytest.raises(PlanError, match=message):
            Partition(world_size=2, shards=tuple(shards)).check([spec("w", 10)])

    def test_refuses_a_world_without_ranks(self) -> None:
        with pytest.raises(PlanError, match="at least one rank, got world_size=0"):
            Partition(world_size=0, shards=()).check([])

    def test_refuses_two_parameters_of_one_name(self) -> None:
        partition = Partition(world_size=1, shards=(Shard("w", 0, 2, 0),))
        with pytest.raises(PlanError, match="more than once: 'w'"):
            partition.check([spec("w", 2), spec("w", 2)])
        with pytest.raises(PlanError, match="more than once: 'w'"):
            Plan.build([spec("w", 2), spec("w", 2)], partition, partitioner="by hand")

    def test_a_long_list_of_unknown_names_is_cut(self) -> None:
        shards = tuple(Shard(f"p{index}", 0, 1, 0) for index in range(9))
        with pytest.raises(PlanError, match="'p4' and 4 more"):
            Partition(world_size=1, shards=shards).check([])

    def test_joins_a_group_added_later(self) -> None:
        added = Partition(world_size=3, shards=(Shard("late", 0, 2, 2),))
        PARTITION.joined_with(added).check([*PARAMS, spec("late", 2)])
        with pytest.raises(PlanError, match="3 and 4 ranks"):
            PARTITION.joined_with(Partition(world_size=4, shards=()))

    def test_arranges_shards_by_parameter(self) -> None:
        by_rank = sorted(PARTITION.shards, key=lambda shard: (shard.rank, shard.start))
        arranged = Partition.arranged(PARAMS, 3, by_rank)
        assert list(arranged.by_param) == [param.name for param in PARAMS]
        assert sorted(map(repr, arranged.shards)) == sorted(map(repr, PARTITION.shards))


class TestBuckets:
    def test_hold_one_dtype_and_what_fits_last_parameters_first(self) -> None:
        groups = group_for_travel(PARAMS, 1700)
        assert [[param.name for param in group] for group in groups] == [
            ["frozen", "scale", "empty", "head"],
            ["norm"],
            ["embed"],
        ]

    def test_are_ordered_by_owner_and_leave_out_what_is_frozen(self) -> None:
        buckets = build_buckets(PARAMS, PARTITION, 1700)
        assert [bucket.params for bucket in buckets] == [("head", "scale", "empty"), ("norm",), ("embed",)]
        assert buckets[0].splits == (300, 101, 0)
        assert (buckets[1].nbytes, buckets[2].nbytes) == (16, 1600)

    @pytest.mark.parametrize(
        ("sizes", "expected"),
        [
            ({"up.weight": 60, "up.bias": 4, "down.weight": 60, "down.bias": 4}, [["down.*"], ["up.*"]]),
            # Several small ones of the module that follows, and a module inside it, which is another.
            ({"a.w": 60, "a.x": 3, "a.y": 3, "b.w": 60}, [["b.w"], ["a.w", "a.x", "a.y"]]),
            ({"a.w": 60, "a.in.x": 3, "b.w": 60}, [["a.in.x", "b.w"], ["a.w"]]),
            # Larger than the parameter that does not fit: a module of very many is cut where the bucket is full.
            ({"a.0": 30, "a.1": 30, "a.2": 30, "b.0": 30}, [["a.2", "b.0"], ["a.0", "a.1"]]),
            ({"a.0": 40, "a.1": 10, "b.0": 60}, [["b.0"], ["a.0", "a.1"]]),
            ({"a.0": 90, "a.1": 15, "b.0": 60}, [["a.1", "b.0"], ["a.0"]]),  # together they would be too large
            ({"a.0": 200, "a.1": 50, "b.0": 30}, [["b.0"], ["a.0", "a.1"]]),  # which they are anyway
            ({"a.0": 60, "a.1": 60}, [["a.1"], ["a.0"]]),  # nothing would be left
            ({"w": 60, "b": 4, "v": 60}, [["b", "v"], ["w"]]),  # of no module
        ],
    )
    def test_end_between_modules(self, sizes: dict[str, int], expected: list[list[str]]) -> None:
        groups = group_for_travel([spec(name, size) for name, size in sizes.items()], 400)
        wanted = [[name for name in sizes for one in group if fnmatch(name, one)] for group in expected]
        assert [[param.name for param in group] for group in groups] == wanted

    @given(
        st.lists(
            st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.sampled_from(["float32", "int8"])), max_size=30
        ),
        st.integers(1, 200),
    )
    def test_any_parameters_keep_their_order_and_fit(self, drawn: list[tuple[str, int, str]], limit: int) -> None:
        params = [
            ParamSpec(name=f"{module}.{index}", shape=(size,), dtype=dtype)
            for index, (module, size, dtype) in enumerate(drawn)
        ]
        groups = group_for_travel(params, limit)
        assert all(group and len({param.dtype for param in group}) == 1 for group in groups)
        for dtype in ("float32", "int8"):
            travelling = [param for group in reversed(groups) for param in group if param.dtype == dtype]
            assert travelling == [param for param in params if param.dtype == dtype]
        for group in groups:
            sizes = [param.nbytes for param in group]
            # What goes with one parameter that is too large alone is no larger than it.
            assert sum(sizes) <= limit or (max(sizes) > limit and sum(sizes) <= 2 * max(sizes))

    def test_none_makes_one_per_dtype(self) -> None:
        assert [bucket.dtype for bucket in build_buckets(PARAMS, PARTITION)] == ["float32", "bfloat16"]


class TestPlan:
    def test_counts_trained_bytes(self) -> None:
        plan = example_plan()
        assert plan.bytes_per_rank == (1800, 1420, 0)
        assert plan.imbalance == pytest.approx(1800 * 3 / 3220)
        assert plan.world_size == 3

    def test_of_nothing_is_balanced(self) -> None:
        plan = Plan.build([], Partition(world_size=2, shards=()), partitioner="by hand")
        assert (plan.imbalance, plan.nbytes, plan.buckets) == (1.0, 0, ())
        assert "0 parameters" in plan.describe()
        assert Plan.from_json(plan.to_json()) == plan

    def test_describes_itself(self) -> None:
        assert example_plan().describe().splitlines() == [
            f"plan {example_plan().fingerprint}: 6 parameters (5 trained, 3.1 KiB) over 3 ranks by by hand, "
            "imbalance 1.677",
            "  rank 0: 1.8 KiB in 3 shards",
            "  rank 1: 1.4 KiB in 5 shards",
            "  rank 2: nothing",
            "  bucket 0: 1.6 KiB float32, 3 parameters, head .. empty",
            "  bucket 1: 16 B bfloat16, 1 parameter, norm",
            "  bucket 2: 1.6 KiB float32, 1 parameter, embed",
        ]

    def test_describes_a_large_plan_briefly(self) -> None:
        params = [spec(f"p{index}", 2**20) for index in range(40)]
        shards = tuple(Shard(param.name, 0, 2**20, index) for index, param in enumerate(params))
        plan = Plan.build(params, Partition(world_size=40, shards=shards), partitioner="greedy", bucket_bytes=2**22)
        text = plan.describe(max_rows=2)
        assert "rank 1: 4.0 MiB in 1 shard\n  ... 38 more ranks\n" in text
        assert text.endswith("... 38 more buckets")

    def test_fingerprint_is_that_of_other_processes(self) -> None:
        """Whatever order a process keeps its strings in."""
        code = (
            "import json, sys; from shardrt import Plan; "
            "sys.stdout.write(Plan.from_json(json.load(sys.stdin)).fingerprint)"
        )
        document = json.dumps(example_plan().to_json())
        found = {
            subprocess.run(
                [sys.executable, "-c", code],
                input=document,
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "PYTHONHASHSEED": seed},
            ).stdout
            for seed in ("1", "2")
        }
        assert found == {example_plan().fingerprint}

    @pytest.mark.parametrize(
        "other",
        [
            Plan.build(PARAMS, PARTITION, partitioner="other", bucket_bytes=1700),
            Plan.build(PARAMS, PARTITION, partitioner="by hand", bucket_bytes=1600),
            Plan.build(PARAMS[::-1], PARTITION, partitioner="by hand", bucket_bytes=1700),
        ],
    )
    def test_fingerprint_tells_plans_apart(self, other: Plan) -> None:
        assert other.fingerprint != example_plan().fingerprint

    def test_fingerprint_depends_on_dtype_training_and_group(self) -> None:
        partition = Partition(world_size=1, shards=(Shard("w", 0, 4, 0),))
        variants = [
            {},
            {"dtype": "int32"},
            {"trainable": False},
            {"group": 1},
            {"shape": (2, 2)},
        ]
        found = {
            Plan.build(
                [ParamSpec(**{"name": "w", "shape": (4,), "dtype": "float32", **variant})],
                partition,
                partitioner="by hand",
            ).fingerprint
            for variant in variants
        }
        assert len(found) == len(variants)


class TestParamSpec:
    def test_of_a_scalar_has_one_element(self) -> None:
        assert spec("s").numel == 1

    def test_of_an_unknown_dtype_says_which_are_known(self) -> None:
        for read in (lambda param: param.nbytes, lambda param: param.itemsize):
            with pytest.raises(PlanError, match="'w' has dtype 'float7'; known dtypes: bool,"):
                read(spec("w", 1, dtype="float7"))


class TestEvenCutter:
    @given(
        sizes=st.lists(st.lists(st.integers(0, 4000), min_size=1, max_size=5), max_size=6),
        world_size=st.integers(1, 5),
        align=st.integers(1, 100),
    )
    def test_over_many_lists_no_rank_is_off_by_more_than_the_alignment(
        self, sizes: list[list[int]], world_size: int, align: int
    ) -> None:
        cutter = EvenCutter(world_size=world_size, align=align)
        loads = [0] * world_size
        for row in sizes:
            for shard in cutter.cut([spec(f"p{index}", size) for index, size in enumerate(row)]):
                loads[shard.rank] += shard.numel
        mean = sum(map(sum, sizes)) / world_size
        assert all(abs(load - mean) <= align for load in loads)

    def test_of_nothing_is_nothing(self) -> None:
        assert EvenCutter(world_size=2).cut([]) == []

    def test_refuses_an_alignment_that_is_none(self) -> None:
        with pytest.raises(ConfigError, match="align must be a number of elements from 1 up, got 0"):
            EvenCutter(world_size=2, align=0)


@given(st.lists(st.integers(0, 99), max_size=30), st.lists(st.integers(0, 99), min_size=1, max_size=6))
def test_largest_first_equals_its_slow_twin(sizes: list[int], loads: list[int]) -> None:
    expected = [0] * len(sizes)
    totals = list(loads)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        rank = totals.index(min(totals))
        expected[item] = rank
        totals[rank] += sizes[item]
    assert spread_largest_first(sizes, loads) == expected


def test_a_bucket_counts_each_parameter_once() -> None:
    bucket = Bucket(dtype="int8", world_size=2, shards=(Shard("w", 0, 2, 0), Shard("w", 2, 5, 1)))
    assert (bucket.params, bucket.splits, bucket.nbytes) == (("w",), (2, 3), 5)

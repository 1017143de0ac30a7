"""Properties of the built-in partitioners."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardrt_bucket.partitioner import BucketPartitioner
from shardrt_flat.partitioner import FlatPartitioner
from shardrt_greedy.partitioner import GreedyPartitioner

from shardrt import ParamSpec, Partition, PartitionRequest, Plan, load_registry
from shardrt.errors import ConfigError, UnsupportedError
from shardrt.plan import BLOCK, group_for_travel
from shardrt.protocols import Partitioner

MAKERS = {
    "greedy": GreedyPartitioner,
    "greedy elements": lambda: GreedyPartitioner(cost="elements"),
    "greedy bytes": lambda: GreedyPartitioner(cost="bytes"),
    "greedy matrix": lambda: GreedyPartitioner(cost="matrix"),
    "greedy costs": lambda: GreedyPartitioner(costs=lambda spec: 0.1 * spec.numel),
    "flat": FlatPartitioner,
    "flat to the element": lambda: FlatPartitioner(align=1),
    "bucket": BucketPartitioner,
    "bucket to the element": lambda: BucketPartitioner(align=1),
    "bucket whole": lambda: BucketPartitioner(split=False),
}
WHOLE = [name for name in MAKERS if name.startswith("greedy") or name == "bucket whole"]
CUTTING = [name for name in MAKERS if name not in WHOLE]

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.tuples(st.integers(0, 3000))
dtypes = st.sampled_from(["float32", "bfloat16", "int8"])


@st.composite
def requests(draw: st.DrawFn, *, whole: bool = False) -> PartitionRequest:
    """Scalars, empty parameters, mixed dtypes, frozen ones, none at all; fewer and more ranks than parameters."""
    described = draw(st.lists(st.tuples(shapes, dtypes, st.booleans()), max_size=12))
    names = draw(st.permutations([f"p{index}" for index in range(len(described))]))
    world_size = draw(st.integers(1, 9))
    return PartitionRequest(
        params=tuple(
            ParamSpec(name=name, shape=shape, dtype=dtype, trainable=trainable)
            for name, (shape, dtype, trainable) in zip(names, described, strict=True)
        ),
        world_size=world_size,
        whole_parameters=whole,
        bucket_bytes=draw(st.none() | st.integers(1, 4000)),
        load=draw(st.just(()) | st.tuples(*[st.integers(0, 5000)] * world_size)),
    )


def specs_of(sizes: Sequence[int], **fields: Any) -> tuple[ParamSpec, ...]:
    return tuple(
        ParamSpec(**{"name": f"p{index:05d}", "shape": (size,), "dtype": "float32", **fields})
        for index, size in enumerate(sizes)
    )


def elements_by_rank(partition: Partition, names: set[str]) -> list[int]:
    found = [0] * partition.world_size
    for shard in partition.shards:
        found[shard.rank] += shard.numel * (shard.param in names)
    return found


def names_of(params: Sequence[ParamSpec]) -> set[str]:
    return {spec.name for spec in params}


def owners_of(partition: Partition) -> dict[str, int]:
    return {shard.param: shard.rank for shard in partition.shards}


class TestEveryPartitioner:
    @pytest.mark.parametrize("maker", MAKERS)
    @given(request=requests())
    def test_covers_every_element_once_in_parameter_order(self, maker: str, request: PartitionRequest) -> None:
        partition = MAKERS[maker]().partition(request)
        partition.check(request.params)
        assert partition.world_size == request.world_size
        assert list(dict.fromkeys(shard.param for shard in partition.shards)) == [spec.name for spec in request.params]
        for spec in request.params:
            pieces = partition.by_param[spec.name]
            owned = [element for piece in pieces for element in range(piece.start, piece.stop)]
            assert owned == list(range(spec.numel))
            assert all(piece.numel for piece in pieces) or (not spec.numel and len(pieces) == 1)

    @given(maker=st.sampled_from(list(MAKERS)), request=requests())
    def test_gives_the_same_answer_again(self, maker: str, request: PartitionRequest) -> None:
        partitioner = MAKERS[maker]()
        assert partitioner.partition(request) == partitioner.partition(request) == MAKERS[maker]().partition(request)

    @given(maker=st.sampled_from(WHOLE), request=requests(whole=True))
    def test_whole_parameters_are_respected(self, maker: str, request: PartitionRequest) -> None:
        partitioner = MAKERS[maker]()
        assert not partitioner.cuts_parameters
        assert len(partitioner.partition(request).shards) == len(request.params)

    @given(maker=st.sampled_from(CUTTING), request=requests(whole=True))
    def test_or_refused_naming_one_that_can(self, maker: str, request: PartitionRequest) -> None:
        partitioner = MAKERS[maker]()
        assert partitioner.cuts_parameters
        with pytest.raises(UnsupportedError, match=r"cuts parameters into ranges.*partitioner='greedy'"):
            partitioner.partition(request)

    @pytest.mark.parametrize("maker", MAKERS)
    def test_is_a_partitioner(self, maker: str) -> None:
        partitioner = MAKERS[maker]()
        assert isinstance(partitioner, Partitioner)
        assert partitioner.name == maker.split()[0]

    @pytest.mark.parametrize("maker", MAKERS)
    @pytest.mark.parametrize(
        ("world_size", "load", "message"),
        [(0, (), "at least one rank"), (2, (1,), "1 entries for 2 ranks"), (2, (0, -3), "rank 1 has -3")],
    )
    def test_refuses_an_impossible_request(
        self, maker: str, world_size: int, load: tuple[int, ...], message: str
    ) -> None:
        request = PartitionRequest(params=specs_of([4]), world_size=world_size, load=load)
        with pytest.raises(ConfigError, match=message):
            MAKERS[maker]().partition(request)

    @pytest.mark.parametrize("name", ["greedy", "flat", "bucket"])
    def test_unknown_options_are_refused_with_the_known_ones(self, name: str) -> None:
        factory = load_registry().partitioners.get(name).factory
        with pytest.raises(ConfigError, match=rf"unknown option 'sharding' of {name}; its options: "):
            factory(sharding=1)


class TestOptions:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: GreedyPartitioner(cost="matrx"), "unknown cost of greedy 'matrx'.*did you mean 'matrix'"),
            (lambda: GreedyPartitioner(cost=3), "unknown cost of greedy 3; there is: trainable, elements, bytes, matr"),
            (lambda: GreedyPartitioner(csot="bytes"), "unknown option 'csot'.*did you mean 'cost'"),
            (lambda: GreedyPartitioner(costs="numel"), "must be a function"),
            (lambda: GreedyPartitioner(cost="bytes", costs=lambda spec: 1), "not both"),
            (lambda: FlatPartitioner(align=0), "align of flat.*got 0"),
            (lambda: FlatPartitioner(align=True), "align of flat.*got True"),
            (lambda: BucketPartitioner(align="64"), "align of bucket.*got '64'"),
            (lambda: BucketPartitioner(split="no"), "split of bucket must be true or false, got 'no'"),
        ],
    )
    def test_nonsense_is_refused(self, make: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            make()

    @pytest.mark.parametrize("cost", [-1, float("nan"), float("inf"), "much", None, True])
    def test_costs_must_be_numbers(self, cost: Any) -> None:
        request = PartitionRequest(params=specs_of([4]), world_size=2)
        with pytest.raises(ConfigError, match=r"'p00000'.*finite number from 0 up"):
            GreedyPartitioner(costs=lambda spec: cost).partition(request)


class TestGreedy:
    @given(
        maker=st.sampled_from([name for name in WHOLE if "greedy" in name]), request=requests(), seed=st.integers(0, 99)
    )
    def test_owners_do_not_depend_on_the_order_of_the_input(
        self, maker: str, request: PartitionRequest, seed: int
    ) -> None:
        shuffled = list(request.params)
        random.Random(seed).shuffle(shuffled)
        other = PartitionRequest(params=tuple(shuffled), world_size=request.world_size, load=request.load)
        partitioner = MAKERS[maker]()
        assert owners_of(partitioner.partition(other)) == owners_of(partitioner.partition(request))

    @given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=7), ranks=st.integers(1, 3))
    def test_is_within_the_bound_of_the_best_there_is(self, sizes: list[int], ranks: int) -> None:
        best = min(max(_loads(sizes, owners).values()) for owners in itertools.product(range(ranks), repeat=len(sizes)))
        fullest = max(self._elements(sizes, ranks))
        assert best <= fullest <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9

    @given(sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=300), ranks=st.integers(1, 40))
    def test_no_rank_is_further_above_the_mean_than_the_parameter_it_was_given_last(
        self, sizes: list[int], ranks: int
    ) -> None:
        """The bound that holds without knowing the best: the last one came onto a load below the mean."""
        loads = self._elements(sizes, ranks)
        descending = sorted(sizes, reverse=True)
        beyond_the_first_round = descending[ranks] if len(sizes) > ranks else 0
        mean = sum(sizes) / ranks
        assert max(loads) <= max(descending[0], mean + beyond_the_first_round * (1 - 1 / ranks) + 1e-9)

    @given(sizes=st.lists(st.integers(0, 50), max_size=40), ranks=st.integers(1, 6))
    def test_equals_its_slow_twin(self, sizes: list[int], ranks: int) -> None:
        params = specs_of(sizes)
        loads = [0] * ranks
        expected = {}
        for spec in sorted(params, key=lambda spec: (-spec.numel, spec.name)):
            rank = loads.index(min(loads))
            loads[rank] += spec.numel
            expected[spec.name] = rank
        partition = GreedyPartitioner().partition(PartitionRequest(params=params, world_size=ranks))
        assert owners_of(partition) == expected

    def test_frozen_parameters_are_spread_so_that_a_thaw_is_balanced(self) -> None:
        trained = specs_of([100, 60, 40])
        frozen = tuple(
            ParamSpec(name=f"frozen{index}", shape=(50,), dtype="float32", trainable=False) for index in range(8)
        )
        partition = GreedyPartitioner().partition(PartitionRequest(params=frozen + trained, world_size=2))
        assert elements_by_rank(partition, names_of(trained)) == [100, 100]
        assert elements_by_rank(partition, names_of(frozen)) == [200, 200]

    def test_frozen_parameters_fill_up_what_training_leaves_uneven(self) -> None:
        trained = specs_of([100])
        frozen = tuple(ParamSpec(name=name, shape=(50,), dtype="float32", trainable=False) for name in "ab")
        partition = GreedyPartitioner().partition(PartitionRequest(params=trained + frozen, world_size=2))
        assert owners_of(partition) == {"p00000": 0, "a": 1, "b": 1}

    def test_matrix_balances_the_work_and_not_the_bytes(self) -> None:
        params = (
            ParamSpec(name="square", shape=(64, 64), dtype="float32"),
            ParamSpec(name="conv", shape=(64, 16, 2, 2), dtype="float32"),
            ParamSpec(name="embedding", shape=(100_000,), dtype="float32"),
            ParamSpec(name="frozen", shape=(512, 512), dtype="float32", trainable=False),
        )
        request = PartitionRequest(params=params, world_size=2)
        assert owners_of(GreedyPartitioner(cost="matrix").partition(request)) == {
            "conv": 0,
            "square": 1,
            "embedding": 0,
            "frozen": 1,
        }
        assert owners_of(GreedyPartitioner(cost="bytes").partition(request))["frozen"] == 0

    def test_bytes_owned_already_count(self) -> None:
        request = PartitionRequest(params=specs_of([10, 10]), world_size=3, load=(400, 0, 60))  # 40 bytes each
        assert owners_of(GreedyPartitioner().partition(request)) == {"p00000": 1, "p00001": 1}

    def test_other_costs_prefer_the_ranks_that_own_fewer_bytes(self) -> None:
        request = PartitionRequest(params=specs_of([10, 10]), world_size=3, load=(400, 70, 60))
        assert owners_of(GreedyPartitioner(cost="elements").partition(request)) == {"p00000": 2, "p00001": 1}

    def test_costs_of_the_user_decide(self) -> None:
        request = PartitionRequest(params=specs_of([1000, 1, 1]), world_size=2)
        weigh = {"p00000": 0.2, "p00001": 0.1, "p00002": 0.1}
        partition = GreedyPartitioner(costs=lambda spec: weigh[spec.name]).partition(request)
        assert owners_of(partition) == {"p00000": 0, "p00001": 1, "p00002": 1}

    @staticmethod
    def _elements(sizes: Sequence[int], ranks: int) -> list[int]:
        params = specs_of(sizes)
        partition = GreedyPartitioner(cost="elements").partition(PartitionRequest(params=params, world_size=ranks))
        return elements_by_rank(partition, names_of(params))


def _loads(sizes: Sequence[int], owners: Sequence[int]) -> Counter[int]:
    loads: Counter[int] = Counter()
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] += size
    return loads


class TestFlat:
    @given(request=requests())
    def test_to_the_element_each_class_is_even(self, request: PartitionRequest) -> None:
        partition = FlatPartitioner(align=1).partition(request)
        for specs in _classes(request.params):
            loads = elements_by_rank(partition, names_of(specs))
            assert max(loads) - min(loads) <= 1

    @given(request=requests(), align=st.sampled_from([1, 2, 48, 64, 1000]))
    def test_aligned_runs_are_off_by_no_more_than_the_alignment(self, request: PartitionRequest, align: int) -> None:
        partition = FlatPartitioner(align=align).partition(request)
        for specs in _classes(request.params):
            mean = sum(spec.numel for spec in specs) / request.world_size
            for load in elements_by_rank(partition, names_of(specs)):
                assert abs(load - mean) <= align

    @given(request=requests())
    def test_ranks_ascend_along_each_class(self, request: PartitionRequest) -> None:
        partition = FlatPartitioner().partition(request)
        for specs in _classes(request.params):
            ranks = [shard.rank for spec in specs for shard in partition.by_param[spec.name]]
            assert ranks == sorted(ranks)

    def test_cuts_fall_on_blocks_from_the_start_of_a_parameter(self) -> None:
        params = specs_of([10_007, 333, 77_777])
        partition = FlatPartitioner().partition(PartitionRequest(params=params, world_size=7))
        starts = [shard.start for shard in partition.shards]
        assert len(starts) > len(params)
        assert all(start % BLOCK == 0 for start in starts)

    def test_a_small_model_is_cut_finely_enough_for_every_rank(self) -> None:
        partition = FlatPartitioner().partition(PartitionRequest(params=specs_of([100]), world_size=8))
        assert [shard.rank for shard in partition.shards] == list(range(8))
        assert all(10 <= shard.numel <= 15 for shard in partition.shards)

    def test_leftovers_are_dealt_in_turn(self) -> None:
        dtypes = ["float32", "float16", "bfloat16", "float64"]
        params = tuple(ParamSpec(name=dtype, shape=(9,), dtype=dtype) for dtype in dtypes)
        partition = FlatPartitioner().partition(PartitionRequest(params=params, world_size=4))
        assert elements_by_rank(partition, set(dtypes)) == [9, 9, 9, 9]

    def test_the_first_leftover_goes_to_the_rank_that_owns_least(self) -> None:
        request = PartitionRequest(params=specs_of([1]), world_size=3, load=(5, 4, 9))
        assert owners_of(FlatPartitioner().partition(request)) == {"p00000": 1}


class TestBucket:
    @given(request=requests())
    def test_to_the_element_each_bucket_is_even_and_so_is_their_sum(self, request: PartitionRequest) -> None:
        plan = _plan(BucketPartitioner(align=1), request)
        for bucket in plan.buckets:
            assert max(bucket.splits) - min(bucket.splits) <= 1
        totals = [sum(splits) for splits in zip(*[bucket.splits for bucket in plan.buckets], strict=True)]
        assert not totals or max(totals) - min(totals) <= 1

    @given(request=requests())
    def test_whole_buckets_have_one_owner(self, request: PartitionRequest) -> None:
        for bucket in _plan(BucketPartitioner(split=False), request).buckets:
            assert len({shard.rank for shard in bucket.shards}) == 1

    def test_equal_buckets_do_not_all_round_the_same_way(self) -> None:
        params = specs_of([1000] * 200)
        request = PartitionRequest(params=params, world_size=3, bucket_bytes=4000)
        loads = elements_by_rank(BucketPartitioner().partition(request), names_of(params))
        assert max(loads) - min(loads) <= 2 * BLOCK
        assert all(bucket.numel == 1000 for bucket in _plan(BucketPartitioner(), request).buckets)

    def test_groups_are_the_buckets_of_the_plan(self) -> None:
        params = specs_of([700, 10, 500, 20, 20, 900])
        request = PartitionRequest(params=params, world_size=2, bucket_bytes=3000)
        plan = _plan(BucketPartitioner(split=False), request)
        expected = [names_of(group) for group in group_for_travel(params, 3000)]
        assert [set(bucket.params) for bucket in plan.buckets] == expected

    def test_whole_buckets_honour_what_ranks_own_already(self) -> None:
        request = PartitionRequest(params=specs_of([8, 8]), world_size=2, bucket_bytes=32, load=(1000, 0))
        assert set(owners_of(BucketPartitioner(split=False).partition(request)).values()) == {1}

    def test_frozen_groups_fill_up_after_the_trained_ones(self) -> None:
        frozen = ParamSpec(name="frozen", shape=(8,), dtype="float32", trainable=False)
        request = PartitionRequest(params=(frozen, *specs_of([9])), world_size=2)
        assert owners_of(BucketPartitioner(split=False).partition(request)) == {"p00000": 0, "frozen": 1}

    def test_the_refusal_names_whole_buckets_too(self) -> None:
        request = PartitionRequest(params=specs_of([9]), world_size=2, whole_parameters=True)
        with pytest.raises(UnsupportedError, match="bucket with split=False"):
            BucketPartitioner().partition(request)


def _classes(params: Sequence[ParamSpec]) -> list[list[ParamSpec]]:
    found: dict[tuple[str, bool], list[ParamSpec]] = {}
    for spec in params:
        found.setdefault((spec.dtype, spec.trainable), []).append(spec)
    return list(found.values())


def _plan(partitioner: Partitioner, request: PartitionRequest) -> Plan:
    partition = partitioner.partition(request)
    return Plan.build(request.params, partition, partitioner=partitioner.name, bucket_bytes=request.bucket_bytes)

"""Planning stays near linear: big cases run at all, and small ones are counted."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from shardrt_bucket.partitioner import BucketPartitioner
from shardrt_flat.partitioner import FlatPartitioner
from shardrt_greedy.partitioner import GreedyPartitioner

from shardrt import ParamSpec, Partition, PartitionRequest, Plan
from shardrt.bench.planning import TORCH, measure_planning, transformer_params
from shardrt.cli.bench import bench
from shardrt.errors import ConfigError
from shardrt.plan import balance, spread_largest_first
from shardrt.protocols import Partitioner

MAKERS: dict[str, Callable[[], Partitioner]] = {
    "greedy": GreedyPartitioner,
    "flat": FlatPartitioner,
    "bucket": BucketPartitioner,
    "bucket whole": lambda: BucketPartitioner(split=False),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(("params", "ranks"), [(100_000, 1024), (10_000, 100_000)])
def test_plans_for_big_models_and_big_worlds(maker: str, params: int, ranks: int) -> None:
    specs = transformer_params(params)
    partitioner = MAKERS[maker]()
    partition = partitioner.partition(PartitionRequest(params=specs, world_size=ranks))
    plan = Plan.build(specs, partition, partitioner=partitioner.name)
    assert plan.nbytes == sum(spec.nbytes for spec in specs)
    assert len(plan.fingerprint) == 16
    assert len(partition.shards) <= params + ranks
    if partitioner.cuts_parameters:
        assert plan.imbalance < 1.01


def test_a_plan_holds_each_shard_twice_and_no_more() -> None:
    """Once in the partition, once in a bucket: what is stored and compared grows with the shards alone."""
    sizes = {}
    for count in (1000, 2000):
        specs = transformer_params(count)
        partition = FlatPartitioner().partition(PartitionRequest(params=specs, world_size=16))
        plan = Plan.build(specs, partition, partitioner="flat", bucket_bytes=2**26)
        assert sum(len(bucket.shards) for bucket in plan.buckets) == len(partition.shards)
        sizes[count] = len(json.dumps(plan.to_json()))
    assert sizes[2000] < 2.2 * sizes[1000]


@pytest.mark.parametrize("ranks", [4, 400])
def test_largest_first_touches_the_heap_once_per_item(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = []

    def counted(heap: list[int], item: int) -> int:
        replaced.append(item)
        return heapq.heapreplace(heap, item)

    monkeypatch.setattr(balance, "heapq", type("heapq", (), {"heapreplace": counted, "heapify": heapq.heapify}))
    spread_largest_first(list(range(1, 1001)), [0] * ranks)
    assert len(replaced) == 1000


class _Recorder:
    """Counts what it is asked for and gives everything to rank 0."""

    name = "recorder"
    cuts_parameters = False

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def partition(self, request: PartitionRequest) -> Partition:
        self.sizes.append(len(request.params))
        return Partition.arranged(
            request.params,
            request.world_size,
            GreedyPartitioner().partition(PartitionRequest(params=request.params, world_size=1)).shards,
        )


class TestBenchmark:
    def test_times_every_partitioner_as_often_as_asked(self) -> None:
        recorder = _Recorder()
        report = measure_planning(params=50, ranks=4, rounds=3, growth=False, partitioners={"mine": recorder})
        assert recorder.sizes == [50] * 4, "three rounds, and one more for the balance"
        assert [row.name for row in report.times] == ["mine"]
        assert report.times[0].imbalance == 4.0
        assert report.torch_seconds is not None

    def test_growth_plans_for_ten_times_as_many(self) -> None:
        recorder = _Recorder()
        report = measure_planning(params=50, ranks=4, rounds=1, beside_torch=False, partitioners={"mine": recorder})
        assert sorted(recorder.sizes) == [50, 50, 10_000, 100_000]
        assert report.times[0].growth is not None
        assert report.speedup(report.times[0]) is None

    def test_plans_what_torch_would(self) -> None:
        """The parameters of the two contestants are the same list, and balance alike."""
        from shardrt.bench.planning import _torch_planner

        specs = transformer_params(200)
        per_rank: Any = _torch_planner(specs, 8)()
        theirs = sorted(sum(tensor.numel() for group in groups for tensor in group["params"]) for groups in per_rank)
        partition = GreedyPartitioner(cost="elements").partition(PartitionRequest(params=specs, world_size=8))
        ours = sorted(sum(shard.numel for shard in partition.owned_by(rank)) for rank in range(8))
        assert ours == theirs

    def test_refuses_nothing_to_do(self) -> None:
        with pytest.raises(ConfigError, match="ranks must be 1 or more, got 0"):
            measure_planning(ranks=0)

    def test_prints_a_table(self) -> None:
        result = CliRunner().invoke(
            bench, ["planning", "--params", "60", "--ranks", "4", "--rounds", "1", "--no-growth"]
        )
        assert result.exit_code == 0, result.output
        assert "planning 60 parameters for 4 ranks" in result.output
        assert all(name in result.output for name in ("greedy", "flat", "bucket", TORCH))

    def test_prints_json(self) -> None:
        arguments = ["planning", "--params", "60", "--ranks", "4", "--rounds", "1", "--no-growth", "--json"]
        document = json.loads(CliRunner().invoke(bench, arguments).output)
        assert {"greedy", "flat", "bucket"} <= {row["name"] for row in document["partitioners"]}
        assert all(row["times_faster_than_torch"] > 0 for row in document["partitioners"])


def test_the_transformer_is_made_of_distinct_parameters() -> None:
    specs = transformer_params(1234)
    assert len({spec.name for spec in specs}) == 1234
    assert all(isinstance(spec, ParamSpec) and spec.numel for spec in specs)

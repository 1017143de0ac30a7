"""The partitioner passes shardrt's conformance kit, and deals out as it says."""

from __future__ import annotations

import pytest
from shardrt_stripes.stripes import StripesPartitioner

from shardrt import ParamSpec, PartitionRequest
from shardrt.errors import ConfigError
from shardrt.testing import PartitionerConformance


class TestStripes(PartitionerConformance):
    @classmethod
    def make(cls) -> StripesPartitioner:
        return StripesPartitioner(size=256)


PARAMS = tuple(ParamSpec(name=name, shape=(size,), dtype="float32") for name, size in [("a", 10), ("b", 3)])


def test_stripes_go_round_and_round() -> None:
    partition = StripesPartitioner(size=4).partition(PartitionRequest(params=PARAMS, world_size=2))
    assert [(shard.numel, shard.rank) for shard in partition.shards] == [(4, 0), (4, 1), (2, 0), (3, 1)]


def test_whole_parameters_go_round_too() -> None:
    request = PartitionRequest(params=PARAMS, world_size=2, whole_parameters=True, load=(8, 0))
    partition = StripesPartitioner(size=4).partition(request)
    assert [(shard.numel, shard.rank) for shard in partition.shards] == [(10, 1), (3, 0)]


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "64"])
def test_a_size_that_cannot_be_meant(size: object) -> None:
    with pytest.raises(ConfigError, match="size of stripes must be"):
        StripesPartitioner(size=size)  # type: ignore[arg-type]

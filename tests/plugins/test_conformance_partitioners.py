"""Every built-in partitioner passes the same kit as anyone's."""

from __future__ import annotations

from shardrt import load_registry
from shardrt.protocols import Partitioner
from shardrt.testing import PartitionerConformance


class TestGreedy(PartitionerConformance):
    @classmethod
    def make(cls) -> Partitioner:
        return load_registry().partitioners.get("greedy").factory()


class TestFlat(PartitionerConformance):
    @classmethod
    def make(cls) -> Partitioner:
        return load_registry().partitioners.get("flat").factory()


class TestBucket(PartitionerConformance):
    @classmethod
    def make(cls) -> Partitioner:
        return load_registry().partitioners.get("bucket").factory()

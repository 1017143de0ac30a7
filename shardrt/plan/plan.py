"""Partition, buckets and bytes per rank in one frozen, comparable, storable object."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from shardrt.errors import PlanError
from shardrt.plan.buckets import Bucket, build_buckets, build_still_buckets, check_buckets
from shardrt.plan.params import ParamSpec
from shardrt.plan.partition import Partition
from shardrt.plan.reading import read_field, read_list, read_text

PLAN_FORMAT = 1


@attrs.frozen(kw_only=True, slots=False)
class Plan:
    """What all ranks agree on before the first collective.

    Example:
        >>> from shardrt import ParamSpec, Partition, Plan, Shard
        >>> shapes = {"w": (4, 2), "b": (2,)}
        >>> params = [ParamSpec(name=name, shape=shape, dtype="float32") for name, shape in shapes.items()]
        >>> partition = Partition(world_size=2, shards=(Shard("w", 0, 8, 0), Shard("b", 0, 2, 1)))
        >>> plan = Plan.build(params, partition, partitioner="greedy")
        >>> plan.bytes_per_rank, round(plan.imbalance, 2)
        ((32, 8), 1.6)
        >>> Plan.from_json(plan.to_json()) == plan
        True
    """

    partitioner: str
    params: tuple[ParamSpec, ...]
    partition: Partition
    buckets: tuple[Bucket, ...]
    still: tuple[Bucket, ...] = ()
    """Buckets of frozen parameters, where these are sharded too: gathered, and never reduced."""

    @classmethod
    def build(
        cls,
        params: Sequence[ParamSpec],
        partition: Partition,
        *,
        partitioner: str,
        bucket_bytes: int | None = None,
        units: Sequence[Sequence[str]] | None = None,
    ) -> Plan:
        """Check the partition against the parameters and lay out the buckets.

        ``units`` are names of parameters that are gathered together, frozen ones included.
        """
        partition.check(params)
        return cls(
            partitioner=partitioner,
            params=tuple(params),
            partition=partition,
            buckets=build_buckets(params, partition, bucket_bytes, units),
            still=() if units is None else build_still_buckets(params, partition, units),
        )

    @property
    def world_size(self) -> int:
        """Number of ranks the plan is for."""
        return self.partition.world_size

    @cached_property
    def bytes_per_rank(self) -> tuple[int, ...]:
        """Bytes of trained parameters owned by each rank; optimizer state follows the same proportions."""
        itemsize = {spec.name: spec.itemsize for spec in self.params if spec.trainable}
        found = [0] * self.world_size
        for shard in self.partition.shards:
            found[shard.rank] += shard.numel * itemsize.get(shard.param, 0)
        return tuple(found)

    @property
    def nbytes(self) -> int:
        """Bytes of all trained parameters."""
        return sum(self.bytes_per_rank)

    @property
    def imbalance(self) -> float:
        """The fullest rank's bytes over the mean: 1.0 is perfect."""
        return max(self.bytes_per_rank) * self.world_size / self.nbytes if self.nbytes else 1.0

    @cached_property
    def fingerprint(self) -> str:
        """A short digest of the whole plan: equal on all ranks, or they must not train together."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def describe(self, *, max_rows: int = 8) -> str:
        """A readable summary, one line per rank and per bucket, cut after ``max_rows`` of each."""
        trained = sum(spec.trainable for spec in self.params)
        lines = [
            f"plan {self.fingerprint}: {_counted(len(self.params), 'parameter')} ({trained} trained, "
            f"{_size(self.nbytes)}) over {_counted(self.world_size, 'rank')} by {self.partitioner}, "
            f"imbalance {self.imbalance:.3f}"
        ]
        for rank, nbytes in enumerate(self.bytes_per_rank[:max_rows]):
            count = len(self.partition.owned_by(rank))
            lines.append(
                f"  rank {rank}: " + (f"{_size(nbytes)} in {_counted(count, 'shard')}" if count else "nothing")
            )
        lines += _cut(self.world_size, max_rows, "ranks")
        for index, bucket in enumerate(self.buckets[:max_rows]):
            names = " .. ".join(dict.fromkeys((bucket.params[0], bucket.params[-1])))
            params = _counted(len(bucket.params), "parameter")
            lines.append(f"  bucket {index}: {_size(bucket.nbytes)} {bucket.dtype}, {params}, {names}")
        lines += _cut(len(self.buckets), max_rows, "buckets")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        still = {"still": [bucket.to_json() for bucket in self.still]} if self.still else {}
        return {
            "format": PLAN_FORMAT,
            "partitioner": self.partitioner,
            "params": [spec.to_json() for spec in self.params],
            "partition": self.partition.to_json(),
            "buckets": [bucket.to_json() for bucket in self.buckets],
            **still,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of :meth:`to_json`; refuses a format it does not know and whatever does not fit together."""
        found = read_field(data, "format", where="plan")
        if type(found) is not int or found != PLAN_FORMAT:
            raise PlanError(f"plan format {found!r} cannot be read; this version of shardrt reads format {PLAN_FORMAT}")
        partitioner = read_text(data, "partitioner", where="plan")
        params = tuple(ParamSpec.from_json(item) for item in read_list(data, "params", where="plan"))
        partition = Partition.from_json(read_field(data, "partition", where="plan"))
        partition.check(params)
        buckets = tuple(Bucket.from_json(item) for item in read_list(data, "buckets", where="plan"))
        check_buckets(buckets, params, partition)
        still: tuple[Bucket, ...] = ()
        if "still" in data:
            still = tuple(Bucket.from_json(item) for item in read_list(data, "still", where="plan"))
            check_buckets(still, params, partition, trainable=False)
        return cls(partitioner=partitioner, params=params, partition=partition, buckets=buckets, still=still)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _cut(total: int, shown: int, what: str) -> list[str]:
    return [f"  ... {total - shown} more {what}"] if total > shown else []


def _size(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"

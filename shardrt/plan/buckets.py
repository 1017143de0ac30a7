"""Parameters whose bytes travel together, laid out so that each rank's part is one contiguous run.

Note [Modules stay together]: a module's parameters get their gradients in one go, and forward reads them in one go. A
bucket that ends with the bias of a layer whose weight no longer fitted would wait for that layer's whole backward, and
the layer's forward for both buckets. So what is small and belongs to the module of the parameter that did not fit goes
with it. It may be no larger than that parameter: a module of very many is cut where the bucket is full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from shardrt.errors import PlanError
from shardrt.plan.params import ITEM_SIZES, ParamSpec
from shardrt.plan.partition import Partition, Shard, shards_from_json, shards_to_json
from shardrt.plan.reading import read_count, read_text


@attrs.frozen(kw_only=True, slots=False)
class Bucket:
    """Shards of one dtype, ordered by owner and then by parameter: the layout of the bucket's buffers.

    Example:
        >>> from shardrt import Bucket, Shard
        >>> bucket = Bucket(dtype="float32", world_size=2, shards=(Shard("b", 0, 2, 0), Shard("a", 0, 3, 1)))
        >>> bucket.splits, bucket.numel, bucket.params
        ((2, 3), 5, ('b', 'a'))
        >>> Bucket.from_json(bucket.to_json()) == bucket
        True
    """

    dtype: str
    world_size: int
    shards: tuple[Shard, ...]

    @cached_property
    def numel(self) -> int:
        """Elements of the whole bucket."""
        return sum(shard.numel for shard in self.shards)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole bucket."""
        return self.numel * ITEM_SIZES[self.dtype]

    @cached_property
    def splits(self) -> tuple[int, ...]:
        """Elements owned by each rank: the runs of the buffer, in rank order."""
        found = [0] * self.world_size
        for shard in self.shards:
            found[shard.rank] += shard.numel
        return tuple(found)

    @cached_property
    def params(self) -> tuple[str, ...]:
        """Names of the parameters with elements in this bucket, in buffer order."""
        return tuple(dict.fromkeys(shard.param for shard in self.shards))

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {
            "dtype": self.dtype,
            "world_size": self.world_size,
            "shards": shards_to_json(self.shards),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Bucket:
        """The inverse of :meth:`to_json`; anything malformed is a :class:`~shardrt.errors.PlanError`."""
        dtype = read_text(data, "dtype", where="bucket")
        if dtype not in ITEM_SIZES:
            raise PlanError(f"a bucket has dtype {dtype!r}; known dtypes: {', '.join(ITEM_SIZES)}")
        world_size = read_count(data, "world_size", where="bucket", least=1)
        return cls(dtype=dtype, world_size=world_size, shards=shards_from_json(data, world_size, where="bucket"))


def group_for_travel(params: Sequence[ParamSpec], bucket_bytes: int | None) -> list[list[ParamSpec]]:
    """Parameters grouped into buckets: one dtype each, at most ``bucket_bytes`` unless one parameter alone is larger.

    Groups come in the order in which backward fills them, the last parameters first; inside a group parameters keep
    their order. A group ends between modules where it can: see Note [Modules stay together]. ``None`` makes one group
    per dtype. Bucket-wise partitioners and :func:`build_buckets` share this rule, so that their groups coincide.

    Example:
        >>> from shardrt import ParamSpec
        >>> from shardrt.plan import group_for_travel
        >>> params = [ParamSpec(name=name, shape=(4,), dtype="float32") for name in "abc"]
        >>> [[spec.name for spec in group] for group in group_for_travel(params, bucket_bytes=32)]
        [['b', 'c'], ['a']]
        >>> sizes = {"up.weight": 6, "up.bias": 1, "down.weight": 6, "down.bias": 1}
        >>> params = [ParamSpec(name=name, shape=(size,), dtype="float32") for name, size in sizes.items()]
        >>> [[spec.name for spec in group] for group in group_for_travel(params, bucket_bytes=32)]
        [['down.weight', 'down.bias'], ['up.weight', 'up.bias']]
    """
    groups: list[list[ParamSpec]] = []
    open_groups: dict[str, tuple[list[ParamSpec], int]] = {}
    for spec in reversed(params):
        group, size = open_groups.get(spec.dtype, ([], 0))
        if not group or (bucket_bytes is not None and size + spec.nbytes > bucket_bytes):
            group = [] if bucket_bytes is None else _taken_along(group, spec, bucket_bytes)
            size = sum(one.nbytes for one in group)
            groups.append(group)
        group.append(spec)
        open_groups[spec.dtype] = (group, size + spec.nbytes)
    for group in groups:
        group.reverse()
    return groups


def _taken_along(full: list[ParamSpec], spec: ParamSpec, bucket_bytes: int) -> list[ParamSpec]:
    """Take out of a full group what goes with the parameter that no longer fits. See Note [Modules stay together]."""
    module = spec.name.rpartition(".")[0]
    room = spec.nbytes if spec.nbytes > bucket_bytes else min(spec.nbytes, bucket_bytes - spec.nbytes)
    first, size = len(full), 0
    while module and first and full[first - 1].name.rpartition(".")[0] == module:
        size += full[first - 1].nbytes
        if size > room:
            break
        first -= 1
    if not first:  # else nothing would be left
        return []
    taken = full[first:]
    del full[first:]
    return taken


def build_buckets(
    params: Sequence[ParamSpec],
    partition: Partition,
    bucket_bytes: int | None = None,
    units: Sequence[Sequence[str]] | None = None,
) -> tuple[Bucket, ...]:
    """The buckets of the parameters that are trained; frozen ones do not receive gradients.

    ``units`` are names of parameters that are used together: each unit has buckets of its own, of any size.

    Example:
        >>> from shardrt import ParamSpec, Partition, Shard
        >>> from shardrt.plan import build_buckets
        >>> params = [ParamSpec(name=name, shape=(4,), dtype="float32") for name in "ab"]
        >>> partition = Partition(world_size=2, shards=(Shard("a", 0, 4, 1), Shard("b", 0, 4, 0)))
        >>> [bucket.params for bucket in build_buckets(params, partition)]
        [('b', 'a')]
    """
    if units is None:
        trained = [spec for spec in params if spec.trainable]
        return _laid_out(group_for_travel(trained, bucket_bytes), partition)
    return _buckets_of_units(params, partition, units, trainable=True)


def build_still_buckets(
    params: Sequence[ParamSpec], partition: Partition, units: Sequence[Sequence[str]]
) -> tuple[Bucket, ...]:
    """The buckets of frozen parameters, unit by unit: they are gathered, and never reduced.

    Example:
        >>> from shardrt import ParamSpec, Partition, Shard
        >>> from shardrt.plan import build_still_buckets
        >>> params = [ParamSpec(name=name, shape=(4,), dtype="float32", trainable=name == "a") for name in "ab"]
        >>> partition = Partition(world_size=1, shards=(Shard("a", 0, 4, 0), Shard("b", 0, 4, 0)))
        >>> [bucket.params for bucket in build_still_buckets(params, partition, [["a", "b"]])]
        [('b',)]
    """
    return _buckets_of_units(params, partition, units, trainable=False)


def _buckets_of_units(
    params: Sequence[ParamSpec], partition: Partition, units: Sequence[Sequence[str]], *, trainable: bool
) -> tuple[Bucket, ...]:
    specs = {spec.name: spec for spec in params if spec.trainable is trainable}
    groups: list[list[ParamSpec]] = []
    for unit in reversed(units):
        groups += group_for_travel([specs[name] for name in unit if name in specs], None)
    return _laid_out(groups, partition)


def _laid_out(groups: Sequence[Sequence[ParamSpec]], partition: Partition) -> tuple[Bucket, ...]:
    buckets = []
    for group in groups:
        shards = [shard for spec in group for shard in partition.by_param[spec.name]]
        shards.sort(key=lambda shard: shard.rank)  # stable: parameter order survives inside each owner's run
        buckets.append(Bucket(dtype=group[0].dtype, world_size=partition.world_size, shards=tuple(shards)))
    return tuple(buckets)


def check_buckets(
    buckets: Sequence[Bucket], params: Sequence[ParamSpec], partition: Partition, *, trainable: bool = True
) -> None:
    """Raise :class:`~shardrt.errors.PlanError` unless every trained shard travels in one bucket, in owner order.

    ``trainable=False`` is for buckets of frozen parameters.

    Example:
        >>> from shardrt import ParamSpec, Partition, Shard
        >>> from shardrt.plan import build_buckets, check_buckets
        >>> params = [ParamSpec(name="w", shape=(4,), dtype="float32")]
        >>> partition = Partition(world_size=1, shards=(Shard("w", 0, 4, 0),))
        >>> check_buckets(build_buckets(params, partition), params, partition)
    """
    kind = "trained" if trainable else "frozen"
    dtypes = {spec.name: spec.dtype for spec in params if spec.trainable is trainable}
    waiting = Counter(shard for shard in partition.shards if shard.param in dtypes)
    for index, bucket in enumerate(buckets):
        if bucket.world_size != partition.world_size:
            raise PlanError(
                f"bucket {index} is for {bucket.world_size} ranks, the partition for {partition.world_size}"
            )
        if not bucket.shards:
            raise PlanError(f"bucket {index} holds nothing")
        rank = 0
        for shard in bucket.shards:
            if not waiting[shard]:
                raise PlanError(f"bucket {index} holds {shard}, which no {kind} parameter has or which came before")
            if dtypes[shard.param] != bucket.dtype:
                raise PlanError(
                    f"bucket {index} is of {bucket.dtype} and holds {shard.param!r} of {dtypes[shard.param]}"
                )
            if shard.rank < rank:
                raise PlanError(f"bucket {index} is not ordered by owner: {shard} comes after one of rank {rank}")
            rank = shard.rank
            waiting[shard] -= 1
    forgotten = sorted(shard.param for shard, count in waiting.items() if count)
    if forgotten:
        raise PlanError(f"{len(forgotten)} {kind} shards travel in no bucket, one of parameter {forgotten[0]!r}")

"""Who owns which elements of which parameter: the single currency between partitioner, communicator and optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from shardrt.errors import PlanError
from shardrt.plan.params import ParamSpec
from shardrt.plan.reading import is_count, read_count, read_list


@attrs.frozen
class Shard:
    """The flat element range ``[start, stop)`` of one parameter, in row-major order, owned by one rank.

    Example:
        >>> from shardrt import Shard
        >>> Shard("w", 0, 10, rank=1).numel
        10
    """

    param: str
    start: int
    stop: int
    rank: int

    @property
    def numel(self) -> int:
        """Elements in the range."""
        return self.stop - self.start


@attrs.frozen(kw_only=True, slots=False)
class Partition:
    """All shards of all parameters, in parameter order and, inside a parameter, in element order.

    A parameter without elements has one empty shard, so that it has an owner too.

    Example:
        >>> from shardrt import ParamSpec, Partition, Shard
        >>> halves = Partition(world_size=2, shards=(Shard("w", 0, 5, 0), Shard("w", 5, 10, 1)))
        >>> halves.check([ParamSpec(name="w", shape=(10,), dtype="float32")])
        >>> [shard.numel for shard in halves.owned_by(1)]
        [5]
        >>> Partition.from_json(halves.to_json()) == halves
        True
    """

    world_size: int
    shards: tuple[Shard, ...]

    @classmethod
    def arranged(cls, params: Iterable[ParamSpec], world_size: int, shards: Iterable[Shard]) -> Partition:
        """A partition of shards that come grouped in some other way, put into the order of the parameters.

        Shards of one parameter keep their order; they must be of parameters that are given.

        Example:
            >>> from shardrt import ParamSpec, Partition, Shard
            >>> params = [ParamSpec(name=name, shape=(1,), dtype="float32") for name in "ab"]
            >>> shards = [Shard("b", 0, 1, 0), Shard("a", 0, 1, 1)]
            >>> [shard.param for shard in Partition.arranged(params, 2, shards).shards]
            ['a', 'b']
        """
        place = {spec.name: index for index, spec in enumerate(params)}
        return cls(world_size=world_size, shards=tuple(sorted(shards, key=lambda shard: place[shard.param])))

    @cached_property
    def by_param(self) -> Mapping[str, tuple[Shard, ...]]:
        """The shards of each parameter, in element order."""
        found: dict[str, list[Shard]] = {}
        for shard in self.shards:
            found.setdefault(shard.param, []).append(shard)
        return {name: tuple(shards) for name, shards in found.items()}

    @cached_property
    def _by_rank(self) -> Mapping[int, tuple[Shard, ...]]:
        found: dict[int, list[Shard]] = {}
        for shard in self.shards:
            found.setdefault(shard.rank, []).append(shard)
        return {rank: tuple(shards) for rank, shards in found.items()}

    def owned_by(self, rank: int) -> tuple[Shard, ...]:
        """What one rank owns, in parameter order; empty when there are more ranks than shards."""
        return self._by_rank.get(rank, ())

    def check(self, params: Sequence[ParamSpec]) -> None:
        """Raise :class:`~shardrt.errors.PlanError` unless every element of every parameter is owned exactly once."""
        if self.world_size < 1:
            raise PlanError(f"a partition needs at least one rank, got world_size={self.world_size}")
        names = {spec.name for spec in params}
        if len(names) != len(params):
            raise PlanError(f"parameter names must differ, these come more than once: {_some(repeated_names(params))}")
        unknown = self.by_param.keys() - names
        if unknown:
            raise PlanError(f"the partition has shards of unknown parameters: {_some(sorted(unknown))}")
        for spec in params:
            shards = self.by_param.get(spec.name)
            if not shards:
                raise PlanError(f"parameter {spec.name!r} ({spec.numel} elements) has no owner in the partition")
            self._check_param(spec, shards)

    def _check_param(self, spec: ParamSpec, shards: Sequence[Shard]) -> None:
        expected = 0
        for shard in shards:
            if shard.start != expected or shard.stop < shard.start:
                kind = "overlap" if shard.start < expected else "leave a gap"
                raise PlanError(
                    f"shards of parameter {spec.name!r} {kind}: expected one to start at element {expected}, "
                    f"found [{shard.start}, {shard.stop}) on rank {shard.rank}"
                )
            if not 0 <= shard.rank < self.world_size:
                raise PlanError(
                    f"parameter {spec.name!r} has a shard on rank {shard.rank}; the world has {self.world_size} ranks"
                )
            expected = shard.stop
        if expected != spec.numel:
            raise PlanError(
                f"shards of parameter {spec.name!r} end at element {expected}; it has {spec.numel} (shape {spec.shape})"
            )

    def joined_with(self, other: Partition) -> Partition:
        """This partition with the parameters of another one after its own (a parameter group added later)."""
        if other.world_size != self.world_size:
            raise PlanError(f"cannot join partitions of {self.world_size} and {other.world_size} ranks")
        return Partition(world_size=self.world_size, shards=self.shards + other.shards)

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {
            "world_size": self.world_size,
            "shards": shards_to_json(self.shards),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Partition:
        """The inverse of :meth:`to_json`; anything malformed is a :class:`~shardrt.errors.PlanError`."""
        world_size = read_count(data, "world_size", where="partition", least=1)
        return cls(world_size=world_size, shards=shards_from_json(data, world_size, where="partition"))


def repeated_names(params: Iterable[ParamSpec]) -> list[str]:
    """Names that more than one parameter has, sorted."""
    counts = Counter(spec.name for spec in params)
    return sorted(name for name, count in counts.items() if count > 1)


def shards_to_json(shards: Iterable[Shard]) -> list[list[Any]]:
    """Each shard as ``[param, start, stop, rank]``."""
    return [[shard.param, shard.start, shard.stop, shard.rank] for shard in shards]


def shards_from_json(data: object, world_size: int, *, where: str) -> tuple[Shard, ...]:
    """The shards of a mapping with a list of them; the inverse of :func:`shards_to_json`."""
    found = []
    for row in read_list(data, "shards", where=where):
        if not isinstance(row, (list, tuple)) or len(row) != 4:
            raise PlanError(f"a shard of {where} must be [param, start, stop, rank], got {row!r}")
        param, start, stop, rank = row
        if not (isinstance(param, str) and is_count(start) and is_count(stop) and is_count(rank)):
            raise PlanError(f"a shard of {where} must be a name and three numbers from 0 up, got {row!r}")
        if stop < start or rank >= world_size:
            raise PlanError(f"a shard of {where} must have start <= stop and rank < {world_size}, got {row!r}")
        found.append(Shard(param, start, stop, rank))
    return tuple(found)


def _some(names: Iterable[str], limit: int = 5) -> str:
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(repr(name) for name in listed[:limit]) + more

"""Ranks as replicas by shards: state is divided inside a group of ranks, and the same in each group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from shardrt.errors import ConfigError


@attrs.frozen(kw_only=True)
class Mesh:
    """Who shares shards with whom.

    Example:
        >>> from shardrt.optim.mesh import Mesh
        >>> mesh = Mesh.of(4, shard_size=2, rank=3)
        >>> mesh.shard_group, mesh.replica_group, mesh.is_first
        ((2, 3), (1, 3), False)
    """

    groups: tuple[tuple[int, ...], ...]
    """Ranks that divide the state among themselves, group by group; the same in each group by place."""
    rank: int

    @classmethod
    def of(cls, world_size: int, *, shard_size: int, rank: int) -> Mesh:
        """Neighbouring ranks share."""
        if type(shard_size) is not int or shard_size < 1 or world_size % shard_size:
            raise ConfigError(
                f"shard_size={shard_size!r} is not possible with {world_size} ranks; give a number that divides them"
            )
        groups = tuple(tuple(range(start, start + shard_size)) for start in range(0, world_size, shard_size))
        return cls(groups=groups, rank=rank)

    @classmethod
    def by_host(cls, hosts: Sequence[str], *, rank: int) -> Mesh:
        """Ranks of one host share; every host must have as many.

        Example:
            >>> from shardrt.optim.mesh import Mesh
            >>> Mesh.by_host(["a", "b", "a", "b"], rank=2).groups
            ((0, 2), (1, 3))
        """
        found: dict[str, list[int]] = {}
        for number, host in enumerate(hosts):
            found.setdefault(host, []).append(number)
        sizes = {host: len(ranks) for host, ranks in found.items()}
        if len(set(sizes.values())) > 1:
            raise ConfigError(
                f"hosts have different numbers of ranks ({sizes}), so that they cannot be replicas of one another; "
                "start as many on each, or pass shard_size="
            )
        return cls(groups=tuple(map(tuple, found.values())), rank=rank)

    @property
    def shard_group(self) -> tuple[int, ...]:
        """The ranks that this one shares with."""
        return next(group for group in self.groups if self.rank in group)

    @property
    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that have the same shards."""
        return tuple(zip(*self.groups, strict=True))

    @property
    def replica_group(self) -> tuple[int, ...]:
        """The ranks that have what this one has."""
        return next(group for group in self.replica_groups if self.rank in group)

    @property
    def is_first(self) -> bool:
        """Whether this rank is of the group that answers for the state."""
        return self.rank in self.groups[0]

    def answering(self, place: int) -> int:
        """The rank that answers for what the ranks of this place in their groups have."""
        return self.groups[0][place]


def groups_of(mesh: Any, world_size: int) -> tuple[tuple[int, ...], ...]:
    """Who shares with whom, from a list of lists of ranks or a ``DeviceMesh`` of two axes, the last of which shards.

    Example:
        >>> from shardrt.optim.mesh import groups_of
        >>> groups_of([[0, 2], [1, 3]], world_size=4)
        ((0, 2), (1, 3))
    """
    rows = mesh.mesh.tolist() if hasattr(mesh, "mesh_dim_names") else mesh
    try:
        found = tuple(tuple(int(rank) for rank in row) for row in rows)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"mesh={mesh!r} is not possible; give groups of ranks, or a DeviceMesh of two axes (replicas, shards)"
        ) from error
    if (
        sorted(rank for row in found for rank in row) != list(range(world_size))
        or len({len(row) for row in found}) != 1
    ):
        raise ConfigError(
            f"mesh={list(map(list, found))} is not possible; groups of one size must have each of the {world_size} "
            "ranks once"
        )
    return found

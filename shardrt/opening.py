"""Communicators of other backends, for a backend that is made of them: found by name, among some ranks or all.

Note [Numbers of inner communicators]: ranks of different groups may open different numbers of inner communicators, and
must still agree on the number of the next one that all of them share. So inner ones do not count with the runtime's:
their numbers are that of the communicator they are part of, plus multiples of a step that no runtime reaches.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import attrs
import torch.distributed as dist

from shardrt.choosing import call_factory
from shardrt.comm.availability import require_available
from shardrt.comm.membership import check_group_fits
from shardrt.config import Choice
from shardrt.errors import ConfigError
from shardrt.protocols import Communicator, Group
from shardrt.registry import Registry

_STEP = 2**40
"""See Note [Numbers of inner communicators]."""


class Subgroups:
    """torch's groups of some ranks. Communicators over the same ranks share one: each has sockets and threads."""

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, ...], ...], Any] = {}

    def of(self, process_group: Any, groups: Sequence[Sequence[int]], *, timeout: float) -> Any:
        """The group that this rank is in; ``groups`` are ranks of the process group, all of which call this."""
        ranks = tuple(tuple(dist.get_global_rank(process_group, rank) for rank in one) for one in groups)
        if ranks not in self._made:
            limit = timedelta(seconds=timeout)
            if process_group is dist.group.WORLD:
                made, _ = dist.new_subgroups_by_enumeration(list(map(list, ranks)), timeout=limit)  # type: ignore[no-untyped-call]
            else:  # ranks of other groups do not take part
                mine = list(next(one for one in ranks if dist.get_rank() in one))
                made = dist.new_group(mine, timeout=limit, use_local_synchronization=True)
            self._made[ranks] = made
        return self._made[ranks]

    def drain(self) -> list[Any]:
        """All that were made; they are forgotten here."""
        made = list(self._made.values())
        self._made.clear()
        return made


def with_opening(group: Group, registry: Registry, subgroups: Subgroups) -> Group:
    """The same group, which offers its backend to open others among its ranks.

    Example:
        >>> from shardrt import Group, load_registry
        >>> from shardrt.comm.control import LocalControl
        >>> from shardrt.opening import Subgroups, with_opening
        >>> alone = Group(rank=0, world_size=1, device_type="cpu", timeout=30.0, control=LocalControl())
        >>> with_opening(alone, load_registry(), Subgroups()).open_among([[0]], "gloo").name
        'null'
    """
    opened = itertools.count(1)

    def open_among(
        groups: Sequence[Sequence[int]], backend: str | Mapping[str, Any], *, recorded: bool = False
    ) -> Communicator:
        if sorted(rank for one in groups for rank in one) != list(range(group.world_size)):
            raise ConfigError(f"groups {groups} must hold each of the ranks 0 to {group.world_size - 1} once")
        members = next(list(one) for one in groups if group.rank in one)
        choice = Choice(name="null") if len(members) == 1 else Choice.parse("backend", backend)
        record = registry.backends.get(group.device_type, choice.name)
        require_available(record)
        check_group_fits(group.process_group, record, "the group it is opened in")
        within = group.process_group
        if within is not None and len(groups) > 1:
            within = subgroups.of(within, groups, timeout=group.timeout)
        about = attrs.evolve(
            group,
            rank=members.index(group.rank),
            world_size=len(members),
            control=group.control.among(groups),
            process_group=within if len(members) > 1 else None,
            number=group.number + next(opened) * _STEP,
            timeline=group.timeline if recorded else None,
            flight=group.flight if recorded else None,
            open_among=None,
        )
        made: Communicator = call_factory("backend", choice, record.factory, about)
        return made

    return attrs.evolve(group, open_among=open_among)

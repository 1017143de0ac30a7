"""The communicator for the ranks at hand: of two levels where they are on several hosts, else of the one that fits.

Communicators are also made for some of the ranks (those of one host, or one of each host, under hybrid strategies):
those need no two levels, and are the backend's inside or across.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardrt.errors import ConfigError
from shardrt.log import rank_logger
from shardrt.protocols import Communicator, Group
from shardrt_hosts.communicator import HostsCommunicator
from shardrt_hosts.layout import HostLayout
from shardrt_hosts.telling import host_name


def make(group: Group, *, inside: str | Mapping[str, Any], across: str | Mapping[str, Any]) -> Communicator:
    """Every rank of the group calls this at the same point."""
    for option, given in (("inside", inside), ("across", across)):
        name = given if isinstance(given, str) else given.get("name") if isinstance(given, Mapping) else None
        if not isinstance(name, str) or name in ("hosts", "auto"):
            raise ConfigError(f"hosts option {option} must name another backend, got {given!r}; as in {option}='gloo'")
    if group.open_among is None:
        raise ConfigError(
            "backend 'hosts' is made of other backends, and this group opens none (Group.open_among is None); make it "
            "through shardrt.Runtime, or give the group shardrt.opening.with_opening"
        )
    layout = HostLayout.of(group.control.exchange("hosts of ranks", host_name()), rank=group.rank)
    if not layout.problem:
        return HostsCommunicator(group, layout, inside=inside, across=across)
    everyone = [list(range(group.world_size))]
    chosen = inside if len(layout.inside) == 1 else across
    rank_logger(group.rank, group.world_size).debug("hosts.one_level", backend=str(chosen), reason=layout.problem)
    return group.open_among(everyone, chosen, recorded=True)

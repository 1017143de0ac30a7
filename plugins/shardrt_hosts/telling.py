"""Whether two levels suit the ranks at hand: each tells its host, and what the backend inside hosts wants to know."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardrt import Availability, BackendRecord, load_registry
from shardrt.registry.probing import probe
from shardrt_hosts.layout import HostLayout

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """The host of this process: ``SHARDRT_HOST`` where that is set, else its name and what tells its boots apart.

    Example:
        >>> from shardrt_hosts.telling import host_name
        >>> host_name() == host_name() != ""
        True
    """
    named = os.environ.get("SHARDRT_HOST")
    if named:
        return named
    boot = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}".strip()


def introduce(inside: str | Mapping[str, Any]) -> dict[str, Any]:
    """This process's host, and its introduction to the backend inside that."""
    record = _record(inside)
    available = probe(record)
    if not available.ok:
        return {"host": host_name(), "reason": available.reason, "fix": available.fix}
    return {"host": host_name(), "word": None if record.introduce is None else record.introduce()}


def suits(introduced: Sequence[Mapping[str, Any]], inside: str | Mapping[str, Any]) -> Availability:
    """Whether hosts have several ranks each, equally many, and the backend inside suits those of this process's."""
    names = [one["host"] for one in introduced]
    layout = HostLayout.of(names, rank=names.index(host_name()))
    if layout.problem:
        return Availability.no(
            layout.problem, fix="start as many ranks on each host, at least 2 on at least 2, or use shm or gloo"
        )
    record = _record(inside)
    ranks = layout.inside[layout.host]
    for rank in ranks:
        if "word" not in introduced[rank]:
            told = introduced[rank]
            return Availability.no(f"{record.name} cannot run on rank {rank}: {told['reason']}", fix=told["fix"])
    answer = Availability.yes() if record.suits is None else record.suits([introduced[rank]["word"] for rank in ranks])
    if not answer.ok:
        listed = ", ".join(map(str, ranks))
        return Availability.no(
            f"{record.name} does not suit ranks {listed} of one host: {answer.reason}", fix=answer.fix
        )
    return Availability.yes(f"{len(layout.inside)} hosts of {len(ranks)} ranks each")


def _record(inside: str | Mapping[str, Any]) -> BackendRecord:
    return load_registry().backends.get("cpu", inside if isinstance(inside, str) else str(inside.get("name")))

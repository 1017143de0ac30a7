"""The hosts backend: one backend inside each host, another across them, for tensors on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardrt import Availability, BackendRecord, Group, hookimpl
from shardrt.protocols import Communicator

SHARDRT_HOOK_VERSION = "1.0"


@hookimpl
def shardrt_backends() -> Iterator[BackendRecord]:
    """Offer ``hosts`` for the CPU."""
    yield BackendRecord(
        name="hosts",
        device_type="cpu",
        summary="several hosts of several ranks: shm inside each, gloo across, where each byte crosses once per host",
        factory=_make,
        process_group="gloo",
        priority=150,
        world_sizes=(4, None),
        introduce=_introduce,
        suits=_suits,
    )


def _make(
    group: Group, *, inside: str | Mapping[str, Any] = "shm", across: str | Mapping[str, Any] = "gloo"
) -> Communicator:
    from shardrt_hosts.making import make

    return make(group, inside=inside, across=across)


def _introduce(*, inside: str | Mapping[str, Any] = "shm") -> dict[str, Any]:
    from shardrt_hosts.telling import introduce

    return introduce(inside)


def _suits(introduced: Sequence[dict[str, Any]], *, inside: str | Mapping[str, Any] = "shm") -> Availability:
    from shardrt_hosts.telling import suits

    return suits(introduced, inside)

"""The shm backend: memory that the ranks of one host share, for tensors on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from shardrt import Availability, BackendRecord, Group, hookimpl
from shardrt.protocols import Communicator

SHARDRT_HOOK_VERSION = "1.0"


@hookimpl
def shardrt_backends() -> Iterator[BackendRecord]:
    """Offer ``shm`` for the CPU."""
    yield BackendRecord(
        name="shm",
        device_type="cpu",
        summary="memory shared by the ranks of one host; no sockets, gradients read where they are",
        factory=_make,
        probe=_probe,
        process_group="gloo",
        priority=200,
        world_sizes=(2, None),
        introduce=_introduce,
        suits=_suits,
    )


def _make(group: Group, *, chunk_mb: float = 0.5) -> Communicator:
    from shardrt_shm.communicator import ShmCommunicator

    return ShmCommunicator(group, chunk_mb=chunk_mb)


def _introduce() -> dict[str, Any]:
    from shardrt_shm.peers import introduce

    return introduce()


def _suits(introduced: Sequence[dict[str, Any]]) -> Availability:
    from shardrt_shm.peers import suits

    return suits(introduced)


def _probe() -> Availability:
    if not sys.platform.startswith("linux"):
        return Availability.no(f"needs Linux, this is {sys.platform}", fix="use gloo")
    from shardrt_shm.futex import why_not

    reason = why_not()
    if reason:
        return Availability.no(reason, fix="use gloo, or allow the system call futex")
    return Availability.yes("Linux, for ranks of one host and user")

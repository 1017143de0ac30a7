"""The gloo backend: point-to-point exchanges over a Gloo process group, for tensors on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

from shardrt import Availability, BackendRecord, Group, hookimpl
from shardrt.protocols import Communicator

SHARDRT_HOOK_VERSION = "1.0"


@hookimpl
def shardrt_backends() -> Iterator[BackendRecord]:
    """Offer ``gloo`` for the CPU."""
    yield BackendRecord(
        name="gloo",
        device_type="cpu",
        summary="TCP between any machines; full duplex, uneven runs, every dtype",
        factory=_make,
        probe=_probe,
        process_group="gloo",
        priority=100,
        world_sizes=(1, None),
    )


def _make(group: Group, *, chunk_mb: float = 8.0, connections: str = "own") -> Communicator:
    from shardrt_gloo.opening import open_communicator

    return open_communicator(group, chunk_mb=chunk_mb, connections=connections)


def _probe() -> Availability:
    import sys

    torch = sys.modules.get("torch")
    # Every CPU wheel of torch has Gloo: only a loaded torch is asked, so that listing plugins does not load it.
    if torch is not None and not torch.distributed.is_gloo_available():
        return Availability.no("this build of torch has no Gloo", fix="install a build of torch with USE_GLOO=1")
    return Availability.yes("part of torch")

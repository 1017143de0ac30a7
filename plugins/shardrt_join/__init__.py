"""What ranks do when some of them have run out of inputs: average over the active, over all, or stop."""

from __future__ import annotations

from collections.abc import Iterator

from shardrt import JoinPolicyRecord, hookimpl

SHARDRT_HOOK_VERSION = "1.1"


@hookimpl
def shardrt_join_policies() -> Iterator[JoinPolicyRecord]:
    """Offer ``active``, ``all`` and ``shortest``."""
    yield JoinPolicyRecord(name="active", summary="average over the ranks that still have inputs", factory=Active)
    yield JoinPolicyRecord(name="all", summary="average over all ranks, those without inputs as zero", factory=All)
    yield JoinPolicyRecord(name="shortest", summary="stop all ranks when the first has run out", factory=Shortest)


class Active:
    """Every input that is trained on counts the same within its update."""

    name = "active"

    def goes_on(self, active: int, world_size: int) -> bool:
        """As long as anybody has inputs."""
        return True

    def divisor(self, active: int, world_size: int) -> int:
        """The ranks that contribute."""
        return active


class All:
    """Updates become smaller as ranks run out, as if those had gradients of zero."""

    name = "all"

    def goes_on(self, active: int, world_size: int) -> bool:
        """As long as anybody has inputs."""
        return True

    def divisor(self, active: int, world_size: int) -> int:
        """All ranks."""
        return world_size


class Shortest:
    """Nobody trains on more than the rank with the fewest inputs; the rest of the others' is left."""

    name = "shortest"

    def goes_on(self, active: int, world_size: int) -> bool:
        """As long as everybody has inputs."""
        return active == world_size

    def divisor(self, active: int, world_size: int) -> int:
        """All ranks, since all contribute."""
        return world_size

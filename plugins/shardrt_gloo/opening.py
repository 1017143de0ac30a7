"""Which communicator a group gets: with connections of its own, or with Gloo's messages where those cannot be made."""

from __future__ import annotations

from shardrt.errors import ConfigError
from shardrt.log import rank_logger
from shardrt.protocols import Group
from shardrt_gloo.communicator import GlooCommunicator, check_chunk
from shardrt_gloo.connecting import connect_ranks
from shardrt_gloo.streams import LANES, StreamsCommunicator

CONNECTIONS = ("own", "gloo")


def open_communicator(group: Group, *, chunk_mb: float = 8.0, connections: str = "own") -> GlooCommunicator:
    """All ranks of a group call this at the same point, and get the same kind."""
    if connections not in CONNECTIONS:
        raise ConfigError(f"gloo option connections must be one of {', '.join(CONNECTIONS)}, got {connections!r}")
    check_chunk(chunk_mb)
    if connections == "own" and group.world_size > 1:
        connected = connect_ranks(group, lanes=LANES)
        if connected.lanes:
            return StreamsCommunicator(group, connected.lanes, chunk_mb=chunk_mb)
        rank_logger(group.rank, group.world_size).info("gloo.messages", reason=connected.reason)
    return GlooCommunicator(group, chunk_mb=chunk_mb)

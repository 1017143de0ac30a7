"""Ranks of a communicator find each other's areas, over the control channel, and part again.

Note [Parting]: a rank that closes its communicator has done its last step, but its peers may still be reading what it
laid out for that. Waiting for them would let one slow rank hold up the others. So the area is kept, and given back at
the next opportunity at which nobody reads it any more: when every peer has done all steps that this rank has, has
closed its own, or has ended. So a peer whose area is gone did the last operation to its end.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from shardrt.errors import BackendUnavailableError
from shardrt.protocols import Group
from shardrt_shm.area import OPEN, Area, AreaLayout, slot_size
from shardrt_shm.arena import process_arena
from shardrt_shm.peers import Peer, introduce, open_peer
from shardrt_shm.steps import Steps


@attrs.frozen(kw_only=True, eq=False)
class Joined:
    """The areas of all ranks, and what keeps them in order."""

    layout: AreaLayout
    own: Area
    areas: dict[int, Area]
    """Of the peers."""
    peers: dict[int, Peer]
    steps: Steps


_parted: list[Joined] = []
"""Areas of closed communicators. See Note [Parting]."""


def part(joined: Joined) -> None:
    """Leave a communicator: nothing is laid out any more."""
    joined.steps.close()
    _parted.append(joined)
    _give_back()


def _give_back() -> None:
    for one in list(_parted):
        if one.steps.is_over() and one in _parted:
            _parted.remove(one)


def join_areas(group: Group, *, chunk_mb: float, progress: Callable[[], None]) -> Joined:
    """Make this rank's area, and open those of the others. Every rank does so at the same point."""
    _give_back()
    layout = AreaLayout(world_size=group.world_size, slot_bytes=slot_size(chunk_mb))
    arena = process_arena()
    try:
        memory = arena.take(layout.nbytes)
    except OSError as error:
        raise BackendUnavailableError(
            f"rank {group.rank} gets no {layout.nbytes} bytes of shared memory: {error}; raise the container's memory "
            "limit, or choose backend='gloo'"
        ) from error
    place = arena.find(memory)
    assert place is not None
    told = {**introduce(), "offset": place.offset, "length": place.length, "slot_bytes": layout.slot_bytes}
    own = Area(layout, memory)
    own.state.value = OPEN
    areas, peers = {}, {}
    for rank, found in enumerate(group.control.exchange(f"shm areas {group.number}", told)):
        if rank == group.rank:
            continue
        if found["slot_bytes"] != layout.slot_bytes:
            raise BackendUnavailableError(
                f"rank {group.rank} has slots of {layout.slot_bytes} bytes, rank {rank} of {found['slot_bytes']}; give "
                "every rank the same chunk_mb"
            )
        peers[rank] = open_peer(rank, found)
        areas[rank] = Area(layout, peers[rank].read(found["offset"], found["length"]))
    watched = [(rank, areas[rank], peers[rank].process) for rank in peers]
    steps = Steps(own, watched, rank=group.rank, timeout=group.timeout, progress=progress)
    return Joined(layout=layout, own=own, areas=areas, peers=peers, steps=steps)

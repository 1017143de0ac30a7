"""What each rank did last, a line for each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardrt.flight.recorder import described

SILENT_SECONDS = 3.5
"""A rank that was not heard for longer than this is stopped, gone, or too busy to say a word."""
MOST_RANKS = 16
"""Ranks that an error tells about; in a larger world those that were heard longest ago."""

WHAT_RANKS_DID = "\nwhat each rank did last:"
"""Begins the lines that are added to an error."""

Beat = Mapping[str, Any]


def tell_ranks(beats: Mapping[int, Beat], *, world_size: int, own: int, now: float) -> list[str]:
    """A line per rank. ``beats`` are their last words, ``now`` the wall clock's time.

    Example:
        >>> from shardrt.flight.telling import tell_ranks
        >>> done = {"kind": "all_gather", "communicator": 4096, "number": 41}
        >>> beats = {0: {"time": 30.0, "finished": done}, 1: {"time": 9.0, "finished": done, "under_way": []}}
        >>> for line in tell_ranks(beats, world_size=3, own=0, now=30.3):
        ...     print(line)
        rank 0 (this one): last finished all_gather 41 of communicator 4096, none under way
        rank 1: silent, last heard 21.3 s ago, last finished all_gather 41 of communicator 4096, none under way
        rank 2: never heard
    """
    ranks = sorted(range(world_size), key=lambda rank: (rank != own, _heard(beats.get(rank))))
    shown = sorted(ranks[:MOST_RANKS])
    lines = [_tell(rank, beats.get(rank), own=rank == own, now=now) for rank in shown]
    if len(ranks) > len(shown):
        latest = now - _heard(beats.get(ranks[MOST_RANKS]))
        lines.append(f"and {len(ranks) - len(shown)} more ranks, all heard in the last {max(latest, 0.0):.1f} s")
    return lines


def is_silent(beat: Beat | None, *, now: float) -> bool:
    """Whether a rank has said nothing for long, and has not left in order."""
    if beat is None:
        return True
    if beat.get("left"):
        return False
    return now - _heard(beat) > SILENT_SECONDS or str(beat.get("process")).startswith(("stopped", "gone"))


def describe_beat(beat: Beat, *, now: float) -> str:
    """What a rank did last, in its own words."""
    parts = []
    if beat.get("failure"):
        parts.append(f"failed with {beat['failure']}")
    elif beat.get("left"):
        parts.append("has closed its runtime")
    finished, failed, running = beat.get("finished"), beat.get("failed"), beat.get("under_way") or ()
    parts.append("has finished nothing yet" if not finished else f"last finished {name_of(finished)}")
    if failed:
        parts.append(f"{name_of(failed)} failed")
    if running:
        parts.append("under way: " + ", ".join(_under_way(one, now) for one in running))
    elif not failed:
        parts.append("none under way")
    return ", ".join(parts)


def name_of(operation: Mapping[str, Any]) -> str:
    """An operation in a few words, from plain values."""
    return described(
        str(operation.get("kind")),
        int(operation.get("communicator") or 0),
        int(operation.get("number") or 0),
        str(operation.get("topic") or ""),
    )


def _tell(rank: int, beat: Beat | None, *, own: bool, now: float) -> str:
    if beat is None:
        return f"rank {rank}: never heard"
    if own:
        return f"rank {rank} (this one): {describe_beat(beat, now=now)}"
    silent = is_silent(beat, now=now)
    process = f" (its process {beat.get('pid')} is {beat['process']})" if silent and beat.get("process") else ""
    ago = max(0.0, now - _heard(beat))
    return (
        f"rank {rank}: {'silent, ' if silent else ''}last heard {ago:.1f} s ago{process}, "
        f"{describe_beat(beat, now=_heard(beat))}"
    )


def _under_way(operation: Mapping[str, Any], now: float) -> str:
    started = operation.get("started")
    since = f" for {max(0.0, now - started):.1f} s" if isinstance(started, (int, float)) else ""
    return f"{name_of(operation)}{since}"


def _heard(beat: Beat | None) -> float:
    return float("-inf") if beat is None else float(beat["time"])

"""Ranks that open a channel find each other in the store, and nobody who was there before.

Note [Meeting]: a launcher that restarts its workers may keep the store (torchrun does, since torch shares the agent's
store), so a store can hold what ranks of an earlier attempt have written, and each of them may have come to another
point. Counting in the store does not help: after a restart ranks would count on from different numbers. Nor does the
launcher's count of restarts: torchrun counts on each host for itself.

So ranks meet. Each writes a word that nobody else ever wrote. Rank 0 reads the words and proposes them, with a new
number. A rank that finds its own word in a proposal seconds it. If all have seconded one proposal, all of them are
there, now, and rank 0 says that it stands: its number is the channel's. A word of an earlier attempt can be proposed,
but nobody is there to second it, and the proposal is renewed when the rank's new word arrives.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from typing import Any

from shardrt.comm.bounded import BoundedStore
from shardrt.errors import CommunicationError

_GRACE_SECONDS = 5.0
"""How much longer than rank 0 the others wait, so that they hear from it who is missing."""


def meet(store: BoundedStore, *, rank: int, world_size: int, timeout: float, topic: str) -> int:
    """The number of a new channel of these ranks, once all are there. See Note [Meeting]."""
    word = f"{os.getpid()}-{uuid.uuid4().hex}"
    store.set(_key(rank), word)
    if rank == 0:
        return _lead(store, word, world_size, timeout, topic)
    return _follow(store, word, rank, world_size, timeout, topic)


def _key(what: int | str) -> str:
    return f"shardrt/meeting/{what}"


def _lead(store: BoundedStore, word: str, world_size: int, timeout: float, topic: str) -> int:
    pauses = _Pauses(timeout)
    others = range(1, world_size)
    proposed: list[str | None] = []
    number = 0
    seconded: set[int] = set()
    while True:
        words = [word, *(_text(store.read(_key(rank))) for rank in others)]
        if None not in words and words != proposed:
            proposed, seconded = words, set()
            number = store.add(_key("count"), 1)
            store.set(_key("proposal"), json.dumps({"number": number, "words": words}))
        if proposed:
            seconded |= {rank for rank in others if rank not in seconded and store.check([_key(f"{number}/{rank}")])}
            if len(seconded) == len(others):
                store.set(_key(f"{number}/stands"), "")
                for rank in others:
                    store.delete_key(_key(f"{number}/{rank}"))
                return number
        if pauses.over():
            silent = [rank for rank in others if words[rank] is None]
            missing = silent or [rank for rank in others if rank not in seconded]
            store.set(_key("missing"), json.dumps({"missing": missing, "words": words}))
            raise missing_ranks(topic, missing, rank=0, world_size=world_size, limit=timeout)


def _follow(store: BoundedStore, word: str, rank: int, world_size: int, timeout: float, topic: str) -> int:
    pauses = _Pauses(timeout + _GRACE_SECONDS)
    number = 0
    while True:
        proposal = _if_it_has(word, rank, store.read(_key("proposal")))
        if proposal is not None and proposal["number"] != number:
            number = proposal["number"]
            store.set(_key(f"{number}/{rank}"), "")
        if number and store.check([_key(f"{number}/stands")]):
            return number
        note = _if_it_has(word, rank, store.read(_key("missing")))
        if note is not None:
            raise missing_ranks(topic, note["missing"], rank=rank, world_size=world_size, limit=timeout)
        if pauses.over():
            raise missing_ranks(topic, [0], rank=rank, world_size=world_size, limit=timeout)


def _if_it_has(word: str, rank: int, data: bytes | None) -> dict[str, Any] | None:
    """What rank 0 wrote, unless it wrote it to somebody of an earlier attempt."""
    if data is None:
        return None
    found: dict[str, Any] = json.loads(data)
    return found if rank < len(found["words"]) and found["words"][rank] == word else None


class _Pauses:
    """Between two looks at the store, growing, and not beyond the deadline."""

    def __init__(self, limit: float) -> None:
        self._deadline = time.monotonic() + limit
        self._pause = 0.0005

    def over(self) -> bool:
        left = self._deadline - time.monotonic()
        if left <= 0:
            return True
        time.sleep(min(self._pause, left))
        self._pause = min(self._pause * 1.5, 0.05)
        return False


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def missing_ranks(topic: str, missing: list[int], *, rank: int, world_size: int, limit: float) -> CommunicationError:
    """The error of a rank that waited in vain for others."""
    who = ", ".join(str(one) for one in missing)
    error = CommunicationError(
        f"rank {rank} waited {limit:g} s at {topic!r} for rank{'s' if len(missing) > 1 else ''} {who} "
        f"of {world_size}; every rank must make the same calls in the same order: see whether it ended, is "
        "stuck elsewhere or skips this call, or raise Runtime(timeout=...)"
    )
    error.ranks = tuple(missing)
    return error

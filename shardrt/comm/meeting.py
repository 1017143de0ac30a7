"""Ranks that open a channel find each other in the store, and nobody who was there before.

Note [Meeting]: a launcher that restarts its workers may keep the store (torchrun does, since torch shares the agent's
store), so a store can hold what ranks of an earlier attempt have written, and each of them may have come to another
point. Counting in the store does not help: after a restart ranks would count on from different numbers. Nor does the
launcher's count of restarts: torchrun counts on each host for itself.

So ranks meet. Each writes a word that nobody else ever wrote. Rank 0 reads the words and proposes them, with a new
number. A rank that finds its own word in a proposal seconds it. If all have seconded one proposal, all of them are
there, now, and rank 0 says that it stands: its number is the channel's. A word of an earlier attempt can be proposed,
but nobody is there to second it, and the proposal is renewed when the rank's new word arrives.

Each rank has a proposal of its own to read, with its word alone: one that held all words would be read by all ranks,
which is n * n words. Rank 0 goes through the ranks in order and looks again only for the first that is still missing:
all must come anyway, and looking for all of them each time would cost more the more there are.
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
_LOOKS_PER_SECOND = 4000
"""How often all ranks together look: in large worlds each looks less often, for the sake of the one store."""


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
    pauses = _Pauses(timeout, world_size)
    words: list[str | None] = [word, *([None] * (world_size - 1))]
    number = 0
    seconded = 1  # how many of the first ranks have: rank 0 agrees with itself
    while True:
        changed = _read_words(store, words, first=seconded)
        if number and seconded == world_size:
            # Somebody of an earlier attempt may have lived long enough to second, and left his place to a newcomer.
            changed = _read_words(store, words, first=1, every=True)
            if not changed:
                break
        if changed and None not in words:
            number, seconded = store.add(_key("count"), 1), 1
            _tell_each(store, "proposal", words, {"number": number})
        if number:
            while seconded < world_size and store.check([_key(f"{number}/{seconded}")]):
                seconded += 1
            if seconded == world_size:
                continue
        if pauses.over():
            missing = _who_is_missing(store, words, number, seconded)
            _tell_each(store, "missing", words, {"missing": missing})
            raise missing_ranks(topic, missing, rank=0, world_size=world_size, limit=timeout)
    store.set(_key(f"{number}/stands"), "")
    for rank in range(1, world_size):
        store.delete_key(_key(f"{number}/{rank}"))
    return number


def _read_words(store: BoundedStore, words: list[str | None], *, first: int, every: bool = False) -> bool:
    """Read on, up to the first rank that has none yet; whether any has changed.

    Once all have a word, only the rank that is waited for is read again: if it has a new one, so may those after it.
    """
    complete = None not in words
    changed = False
    for rank in range(first, len(words)):
        if not complete and words[rank] is not None:
            continue
        found = _text(store.read(_key(rank)))
        if found is None or not (found != words[rank] or changed or every):
            break
        changed = changed or found != words[rank]
        words[rank] = found
    return changed


def _who_is_missing(store: BoundedStore, words: list[str | None], number: int, seconded: int) -> list[int]:
    others = range(1, len(words))
    for rank in others:
        if words[rank] is None:
            words[rank] = _text(store.read(_key(rank)))
    silent = [rank for rank in others if words[rank] is None]
    return silent or [rank for rank in others if rank >= seconded and not store.check([_key(f"{number}/{rank}")])]


def _tell_each(store: BoundedStore, what: str, words: list[str | None], told: dict[str, Any]) -> None:
    for rank, word in enumerate(words):
        if rank and word is not None:
            store.set(_key(f"{what}/{rank}"), json.dumps({**told, "word": word}))


def _follow(store: BoundedStore, word: str, rank: int, world_size: int, timeout: float, topic: str) -> int:
    pauses = _Pauses(timeout + _GRACE_SECONDS, world_size)
    number = 0
    while True:
        proposal = _if_it_has(word, store.read(_key(f"proposal/{rank}")))
        if proposal is not None and proposal["number"] != number:
            number = proposal["number"]
            store.set(_key(f"{number}/{rank}"), "")
        if number and store.check([_key(f"{number}/stands")]):
            return number
        note = _if_it_has(word, store.read(_key(f"missing/{rank}")))
        if note is not None:
            raise missing_ranks(topic, note["missing"], rank=rank, world_size=world_size, limit=timeout)
        if pauses.over():
            raise missing_ranks(topic, [0], rank=rank, world_size=world_size, limit=timeout)


def _if_it_has(word: str, data: bytes | None) -> dict[str, Any] | None:
    """What rank 0 wrote, unless it wrote it to somebody of an earlier attempt."""
    if data is None:
        return None
    found: dict[str, Any] = json.loads(data)
    return found if found["word"] == word else None


class _Pauses:
    """Between two looks at the store, growing, and not beyond the deadline."""

    def __init__(self, limit: float, world_size: int) -> None:
        self._deadline = time.monotonic() + limit
        self._pause = 0.0005
        self._longest = max(0.05, world_size / _LOOKS_PER_SECOND)

    def over(self) -> bool:
        left = self._deadline - time.monotonic()
        if left <= 0:
            return True
        time.sleep(min(self._pause, left))
        self._pause = min(self._pause * 1.5, self._longest)
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

"""Small JSON values between ranks over the group's key-value store: the channel that knows who is missing.

Note [One writer, one reader per key]: every exchange has a number. Each rank writes its own key, rank 0 alone reads
them all and writes the collected answer, everybody reads that. So an exchange costs a handful of store operations per
rank at any world size, and whoever does not arrive is known by name: by rank 0 for the others, by the others for
rank 0. Keys of an exchange are deleted once the following one shows that all ranks have read them.

Note [An exchange among many]: an answer that holds n values and is read by n ranks is n * n values through one process.
Mostly ranks say the same, since they compare digests, so an answer holds each different message once and tells by runs
of ranks who said it: a constant size where all agree. Only n different values that everybody wants are n * n by nature.
Rank 0 waits for the others in groups, one after the other, so that looking again costs no more for many ranks than for
some; and in large worlds everybody looks less often, so that what a store is asked in a second stays the same.

Note [Large values]: torch's store ends the connection of whoever writes a value of more than 8 MB, and what a rank
tells of a checkpoint with a hundred thousand parameters is more than that. So a long text is written in pieces, under
keys of their own, and under its own key, last, how many there are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shardrt.comm.bounded import BoundedStore
from shardrt.comm.meeting import meet, missing_ranks
from shardrt.errors import CommunicationError, HandshakeError, PeerError
from shardrt.flight.heartbeat import beat_key, checked_beat

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from shardrt.flight import FlightRecorder

_LOOK_FOR_FAILURES_SECONDS = 0.5
"""How often a waiting rank looks whether another one has reported a failure."""
_LOOK_SECONDS = 2.0
"""How long a look may take: a store that does not answer must not keep a waiting rank from its own timeout."""
_GRACE_SECONDS = 5.0
"""How much longer than rank 0 the others wait, so that they hear from it who is missing."""


_SOON_SECONDS = 3.0
"""Within this time answers are looked for often: a save makes half a dozen exchanges, and each pause would add up."""
_PIECE = 4 * 2**20
"""Characters in one value of the store; JSON has one byte for each. See Note [Large values]."""
_PIECES = "pieces "
_TOGETHER = 64
"""Keys that are looked for, or read, in one operation. See Note [An exchange among many]."""
_LOOKS_PER_SECOND = 4000
"""How often all ranks together look whether an answer is there. See Note [An exchange among many]."""
_CHANNELS = 1_000_000
"""Numbers that the channels beside one have before those beside the next begin."""


class LocalControl:
    """The channel of a single process: it only has itself to talk to.

    Example:
        >>> from shardrt.comm.control import LocalControl
        >>> LocalControl().exchange("hello", {"x": 1})
        [{'x': 1}]
    """

    rank = 0
    world_size = 1
    number = 0
    failed = False
    timeout = 0.0

    def exchange(self, topic: str, value: Any, *, timeout: float | None = None, to_all: bool = True) -> list[Any]:
        """The value as the others would see it: through JSON and back."""
        del topic, timeout, to_all
        return [json.loads(json.dumps(value))]

    def among(self, groups: Sequence[Sequence[int]]) -> LocalControl:
        """There is nobody to leave out."""
        del groups
        return LocalControl()

    def another(self) -> LocalControl:
        """A channel for a conversation of its own."""
        return LocalControl()

    def on_failure(self, callback: Callable[[int, str], None]) -> None:
        """Nobody else can fail."""

    def peer_failed(self, rank: int, error: str) -> None:
        """There are no peers."""

    def report_failure(self, error: str) -> None:
        """There is nobody to tell."""

    def raise_if_peer_failed(self) -> None:
        """There are no peers."""


class StoreControl:
    """The channel of a process group, over its store."""

    def __init__(
        self, store: Store, *, rank: int, world_size: int, timeout: float, parent: StoreControl | None = None
    ) -> None:
        """With a ``parent`` a channel beside it; failures that are reported there end waits on this one too."""
        self._parent = parent
        self._children = 0
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.store = store
        self.flight: FlightRecorder | None = None
        """Where exchanges are recorded, and who adds to errors what the other ranks did last."""
        self.number: int
        if parent is None:
            self._store = BoundedStore(store, rank=rank, timeout=timeout)
            self.number = meet(self._store, rank=rank, world_size=world_size, timeout=timeout, topic="Runtime")
            self.prefix = f"shardrt/{self.number}"
        else:  # those who have met count together
            self._store, self.flight = parent._store, parent.flight
            self.number = parent.number * _CHANNELS + parent._children
            self.prefix = f"{parent.prefix}/beside/{parent._children}"
        self._exchanges = 0
        self._answered = 0  # how long the last answer was
        self.failed = False
        self._on_failure: Callable[[int, str], None] | None = None

    def among(self, groups: Sequence[Sequence[int]]) -> StoreControl | LocalControl:
        """A channel for some of the ranks: the group that this one is in. Every rank opens it at the same point."""
        self._children += 1
        number, group = next((number, group) for number, group in enumerate(groups) if self.rank in group)
        if len(group) == 1:
            return LocalControl()
        place = list(group).index(self.rank)
        made = StoreControl(self.store, rank=place, world_size=len(group), timeout=self.timeout, parent=self)
        made.prefix += f"/{number}"
        return made

    def another(self) -> StoreControl:
        """A channel for a conversation of its own, beside this one. Every rank opens it at the same point."""
        self._children += 1
        return StoreControl(self.store, rank=self.rank, world_size=self.world_size, timeout=self.timeout, parent=self)

    def exchange(self, topic: str, value: Any, *, timeout: float | None = None, to_all: bool = True) -> list[Any]:
        """Every rank's value, in rank order; see :class:`shardrt.protocols.ControlChannel`."""
        self._exchanges += 1
        flight = self.flight
        if flight is None:
            return self._exchange(topic, value, timeout, to_all)
        operation = flight.issue("exchange", communicator=self.number, number=self._exchanges, topic=topic)
        operation.start()
        try:
            values = self._exchange(topic, value, timeout, to_all)
        except BaseException as error:
            operation.finish(error)
            flight.explain(error)
            raise
        operation.finish()
        return values

    def _exchange(self, topic: str, value: Any, timeout: float | None, to_all: bool) -> list[Any]:
        own_key = self._key(self.rank)
        text = json.dumps({"topic": topic, "world_size": self.world_size, "value": value})
        self._write(own_key, text)
        limit = self.timeout if timeout is None else timeout
        collected = self._collect(limit, to_all) if self.rank == 0 else self._read_collected(limit)
        self._delete(own_key, len(text))
        if "missing" in collected:
            self._raise_missing(topic, collected["missing"], limit)
        messages = _by_rank(collected)
        self._check_same_call(messages)
        return [message["value"] for message in messages]

    def heard(self, seconds: float) -> dict[int, dict[str, Any]]:
        """The last words of all ranks, as far as the store tells them within so many seconds."""
        deadline = time.monotonic() + seconds
        found = {}
        for rank in range(self.world_size):
            if (left := deadline - time.monotonic()) <= 0:
                break
            try:
                data = self._store.read(beat_key(self.prefix, rank), seconds=left)
            except CommunicationError:  # the store is gone, or does not answer
                break
            beat = None if data is None else checked_beat(data)
            if beat is not None:
                found[rank] = beat
        self._add_failure(found, seconds=deadline - time.monotonic())
        return found

    def _add_failure(self, beats: dict[int, dict[str, Any]], *, seconds: float) -> None:
        """A rank that has just failed may not have said so in its last words, but to whoever waits for it."""
        try:
            data = self._store.read(f"{self.prefix}/failed", seconds=seconds) if seconds > 0 else None
        except CommunicationError:
            return
        note = None if data is None else json.loads(data)
        if note is not None and note["rank"] in beats and not beats[note["rank"]].get("failure"):
            beats[note["rank"]]["failure"] = str(note["error"]).partition("\n")[0]

    def report_failure(self, error: str) -> None:
        """Tell the others, who may be waiting for this rank, that it will not come."""
        self.failed = True
        # Only the first failure is kept: what follows is usually its consequence.
        self._store.compare_set(f"{self.prefix}/failed", "", json.dumps({"rank": self.rank, "error": error}))

    def raise_if_peer_failed(self) -> None:
        """Raise :class:`~shardrt.errors.PeerError` if another rank has reported a failure."""
        if self._parent is not None:
            self._parent.raise_if_peer_failed()
        try:
            found = self._store.read(f"{self.prefix}/failed", seconds=_LOOK_SECONDS)
        except CommunicationError:  # the store is gone with its host: who waits learns of that by other ways
            return
        if found is None:
            return
        note = json.loads(found)
        if note["rank"] == self.rank:
            return
        self.failed = True  # what is still under way need not be waited for
        self.peer_failed(note["rank"], note["error"])
        error = PeerError(f"rank {self.rank} stops because rank {note['rank']} failed: {note['error']}")
        if self.flight is not None:
            self.flight.explain(error)
        raise error

    def on_failure(self, callback: Callable[[int, str], None]) -> None:
        """Call back with rank and error before a peer's failure is raised."""
        self._on_failure = callback

    def peer_failed(self, rank: int, error: str) -> None:
        """Tell whoever asked to be told; the error itself is raised next."""
        if self._on_failure is not None:
            self._on_failure(rank, error)

    def _key(self, who: int | str, exchange: int | None = None) -> str:
        return f"{self.prefix}/{self._exchanges if exchange is None else exchange}/{who}"

    def _collect(self, limit: float, to_all: bool) -> dict[str, Any]:
        keys = [self._key(rank) for rank in range(self.world_size)]
        groups = [keys[first : first + _TOGETHER] for first in range(0, len(keys), _TOGETHER)]
        collected: dict[str, Any]
        deadline = time.monotonic() + limit
        if all(self._wait_for(group, deadline - time.monotonic()) for group in groups):
            collected = _in_runs([text for group in groups for text in self._read(group)])
            self._delete(self._key("all", self._exchanges - 1), self._answered)
        else:
            collected = {"missing": [rank for rank, key in enumerate(keys) if not self._store.check([key])]}
        told = collected
        if not to_all and "messages" in collected:
            told = _in_runs([json.dumps({**message, "value": None}) for message in _by_rank(collected)])
        answer = json.dumps(told)
        self._write(self._key("all"), answer)
        self._answered = len(answer)
        return collected

    def _read_collected(self, limit: float) -> dict[str, Any]:
        key = self._key("all")
        if not self._wait_for([key], limit + _GRACE_SECONDS):
            return {"missing": [0]}
        answer: dict[str, Any] = json.loads(self._read([key])[0])
        return answer

    def _write(self, key: str, text: str) -> None:
        """See Note [Large values]."""
        if len(text) > _PIECE:
            for number in range(_pieces(len(text))):
                self._store.set(f"{key}/{number}", text[number * _PIECE : (number + 1) * _PIECE])
            text = f"{_PIECES}{_pieces(len(text))}"
        self._store.set(key, text)

    def _read(self, keys: list[str]) -> list[str]:
        texts = [data.decode() for data in self._store.get_all(keys)]
        for place, (key, text) in enumerate(zip(keys, texts, strict=True)):
            if text.startswith(_PIECES):
                pieces = range(int(text.removeprefix(_PIECES)))
                texts[place] = "".join(self._store.get(f"{key}/{number}").decode() for number in pieces)
        return texts

    def _delete(self, key: str, length: int) -> None:
        self._store.delete_key(key)
        for number in range(_pieces(length)) if length > _PIECE else ():
            self._store.delete_key(f"{key}/{number}")

    def _wait_for(self, keys: list[str], limit: float) -> bool:
        # Asking again with growing pauses, rather than the store's own blocking wait: that one writes a warning on
        # every time-out, and this rank must look for reports of failure in between.
        started = time.monotonic()
        deadline = started + limit
        next_look = started + _LOOK_FOR_FAILURES_SECONDS
        pause = 0.0005
        while not self._store.check(keys):
            now = time.monotonic()
            if now >= deadline:
                return False
            if now >= next_look:
                self.raise_if_peer_failed()
                next_look = now + _LOOK_FOR_FAILURES_SECONDS
            time.sleep(min(pause, deadline - now))
            longest = 0.005 if now < started + _SOON_SECONDS else 0.05
            pause = min(pause * 1.5, max(longest, self.world_size / _LOOKS_PER_SECOND))
        return True

    def _raise_missing(self, topic: str, missing: list[int], limit: float) -> None:
        self.failed = True
        for rank in missing:
            self.peer_failed(rank, f"did not arrive at {topic!r} within {limit:g} s")
        raise missing_ranks(topic, missing, rank=self.rank, world_size=self.world_size, limit=limit)

    def _check_same_call(self, messages: list[dict[str, Any]]) -> None:
        sizes = [*(message["world_size"] for message in messages), self.world_size]
        for rank, size in zip([*range(len(messages)), self.rank], sizes, strict=True):
            if size != sizes[0]:
                raise HandshakeError(
                    f"ranks disagree on the number of ranks: rank 0 has {sizes[0]}, rank {rank} has {size}; "
                    "fix: start every rank with the same WORLD_SIZE"
                )
        topics = [message["topic"] for message in messages]
        for rank, topic in enumerate(topics):
            if topic != topics[0]:
                raise HandshakeError(
                    f"ranks make different calls: rank 0 is at {topics[0]!r}, rank {rank} is at {topic!r}; "
                    "every rank must make the same calls in the same order"
                )


def _pieces(length: int) -> int:
    return -(-length // _PIECE)


def _in_runs(texts: Sequence[str]) -> dict[str, Any]:
    """Messages in rank order, each different one once. See Note [An exchange among many]."""
    places: dict[str, int] = {}
    runs: list[list[int]] = []  # [which message, how many ranks in a row]
    for text in texts:
        place = places.setdefault(text, len(places))
        if runs and runs[-1][0] == place:
            runs[-1][1] += 1
        else:
            runs.append([place, 1])
    return {"messages": [json.loads(text) for text in places], "runs": runs}


def _by_rank(collected: dict[str, Any]) -> list[dict[str, Any]]:
    """One message for each rank; those of ranks that say the same are one object."""
    return [collected["messages"][place] for place, count in collected["runs"] for _ in range(count)]

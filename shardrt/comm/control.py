"""Small JSON values between ranks over the group's key-value store: the channel that knows who is missing.

Note [One writer, one reader per key]: every exchange has a number. Each rank writes its own key, rank 0 alone reads
them all and writes the collected answer, everybody reads that. So an exchange costs a handful of store operations per
rank at any world size, and whoever does not arrive is known by name: by rank 0 for the others, by the others for
rank 0. Keys of an exchange are deleted once the following one shows that all ranks have read them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardrt.errors import CommunicationError, HandshakeError, PeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_LOOK_FOR_FAILURES_SECONDS = 0.5
"""How often a waiting rank looks whether another one has reported a failure."""
_GRACE_SECONDS = 5.0
"""How much longer than rank 0 the others wait, so that they hear from it who is missing."""


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

    def exchange(self, topic: str, value: Any, *, timeout: float | None = None, to_all: bool = True) -> list[Any]:
        """The value as the others would see it: through JSON and back."""
        del topic, timeout, to_all
        return [json.loads(json.dumps(value))]

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
        """Failures that are reported on the ``parent`` end waits on this channel too."""
        self._parent = parent
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self._store = store
        # Counted in the store rather than in the process: the n-th channel a rank opens on a store meets the n-th
        # channel of every other rank, whatever else lives in its process.
        self.number: int = store.add(f"shardrt/channels/{rank}", 1)
        self._prefix = f"shardrt/{self.number}"
        self._exchanges = 0
        self.failed = False
        self._on_failure: Callable[[int, str], None] | None = None

    def another(self) -> StoreControl:
        """A channel for a conversation of its own, beside this one. Every rank opens it at the same point."""
        return StoreControl(self._store, rank=self.rank, world_size=self.world_size, timeout=self.timeout, parent=self)

    def exchange(self, topic: str, value: Any, *, timeout: float | None = None, to_all: bool = True) -> list[Any]:
        """Every rank's value, in rank order; see :class:`shardrt.protocols.ControlChannel`."""
        self._exchanges += 1
        own_key = self._key(self.rank)
        self._store.set(own_key, json.dumps({"topic": topic, "world_size": self.world_size, "value": value}))
        limit = self.timeout if timeout is None else timeout
        collected = self._collect(limit, to_all) if self.rank == 0 else self._read_collected(limit)
        self._store.delete_key(own_key)
        if "missing" in collected:
            self._raise_missing(topic, collected["missing"], limit)
        messages = collected["messages"]
        self._check_same_call(messages)
        return [message["value"] for message in messages]

    def report_failure(self, error: str) -> None:
        """Tell the others, who may be waiting for this rank, that it will not come."""
        self.failed = True
        # Only the first failure is kept: what follows is usually its consequence.
        self._store.compare_set(f"{self._prefix}/failed", "", json.dumps({"rank": self.rank, "error": error}))

    def raise_if_peer_failed(self) -> None:
        """Raise :class:`~shardrt.errors.PeerError` if another rank has reported a failure."""
        if self._parent is not None:
            self._parent.raise_if_peer_failed()
        key = f"{self._prefix}/failed"
        try:
            if not self._store.check([key]):
                return
            note = json.loads(self._store.get(key))
        except RuntimeError:  # the store is gone with its host: who waits learns of that by other ways
            return
        if note["rank"] == self.rank:
            return
        self.peer_failed(note["rank"], note["error"])
        raise PeerError(f"rank {self.rank} stops because rank {note['rank']} failed: {note['error']}")

    def on_failure(self, callback: Callable[[int, str], None]) -> None:
        """Call back with rank and error before a peer's failure is raised."""
        self._on_failure = callback

    def peer_failed(self, rank: int, error: str) -> None:
        """Tell whoever asked to be told; the error itself is raised next."""
        if self._on_failure is not None:
            self._on_failure(rank, error)

    def _key(self, who: int | str, exchange: int | None = None) -> str:
        return f"{self._prefix}/{self._exchanges if exchange is None else exchange}/{who}"

    def _collect(self, limit: float, to_all: bool) -> dict[str, Any]:
        keys = [self._key(rank) for rank in range(self.world_size)]
        collected: dict[str, Any]
        if self._wait_for(keys, limit):
            collected = {"messages": [json.loads(self._store.get(key)) for key in keys]}
            self._store.delete_key(self._key("all", self._exchanges - 1))
        else:
            collected = {"missing": [rank for rank, key in enumerate(keys) if not self._store.check([key])]}
        told = collected
        if not to_all and "messages" in collected:
            told = {"messages": [{**message, "value": None} for message in collected["messages"]]}
        self._store.set(self._key("all"), json.dumps(told))
        return collected

    def _read_collected(self, limit: float) -> dict[str, Any]:
        key = self._key("all")
        if not self._wait_for([key], limit + _GRACE_SECONDS):
            return {"missing": [0]}
        answer: dict[str, Any] = json.loads(self._store.get(key))
        return answer

    def _wait_for(self, keys: list[str], limit: float) -> bool:
        # Asking again with growing pauses, rather than the store's own blocking wait: that one writes a warning on
        # every time-out, and this rank must look for reports of failure in between.
        deadline = time.monotonic() + limit
        next_look = time.monotonic() + _LOOK_FOR_FAILURES_SECONDS
        pause = 0.0005
        while not self._present(keys):
            now = time.monotonic()
            if now >= deadline:
                return False
            if now >= next_look:
                self.raise_if_peer_failed()
                next_look = now + _LOOK_FOR_FAILURES_SECONDS
            time.sleep(min(pause, deadline - now))
            pause = min(pause * 1.5, 0.05)
        return True

    def _present(self, keys: list[str]) -> bool:
        try:
            return self._store.check(keys)
        except RuntimeError as error:  # torch's DistStoreError and DistNetworkError
            raise CommunicationError(
                f"rank {self.rank} lost the group's store, which lives in the launcher or in rank 0: {error}; "
                "look at that process's output for why it ended"
            ) from error

    def _raise_missing(self, topic: str, missing: list[int], limit: float) -> None:
        who = ", ".join(str(rank) for rank in missing)
        for rank in missing:
            self.peer_failed(rank, f"did not arrive at {topic!r} within {limit:g} s")
        raise CommunicationError(
            f"rank {self.rank} waited {limit:g} s at {topic!r} for rank{'s' if len(missing) > 1 else ''} {who} "
            f"of {self.world_size}; every rank must make the same calls in the same order: see whether it ended, is "
            "stuck elsewhere or skips this call, or raise Runtime(timeout=...)"
        )

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

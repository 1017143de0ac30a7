"""About once a second this rank says in the group's store that it is alive and what it is doing.

Note [Heard of a stopped rank]: a rank that is stopped or killed cannot say what it was doing, so everybody says so all
along. Whoever waits for it in vain finds its last words, and when they were said, in the store. They are written by a
thread of their own over a connection of its own, so that nothing waits for them: not the training, and not those who
ask the store for something else. A store that is gone ends the thread quietly; who waits hears of that otherwise.

Note [Connecting takes its time]: for each new connection the server of torch's store looks up the caller's name, and
answers nobody meanwhile: where a name server is slow that is 5 seconds now and then. So not while ranks meet, which is
all through the store: the first words go over the connection that is there, and the own one is made a second later.
"""

from __future__ import annotations

import json
import threading
import weakref
from typing import Any

from shardrt.flight.recorder import FlightRecorder

INTERVAL_SECONDS = 1.0
_LARGE_WORLD = 256
"""Ranks that one store hears every second; in larger worlds everybody speaks less often."""
_FAREWELL_SECONDS = 0.5


def beat_key(prefix: str, rank: int) -> str:
    """Where a rank's last words are.

    Example:
        >>> from shardrt.flight.heartbeat import beat_key
        >>> beat_key("shardrt/1", 2)
        'shardrt/1/heard/2'
    """
    return f"{prefix}/heard/{rank}"


class Heartbeat:
    """The thread that speaks, from now until :meth:`stop` or the end of the interpreter.

    Example:
        >>> import json
        >>> from torch.distributed import HashStore
        >>> from shardrt.flight import FlightRecorder
        >>> from shardrt.flight.heartbeat import Heartbeat, beat_key
        >>> store, flight = HashStore(), FlightRecorder(rank=0, world_size=2)
        >>> heartbeat = Heartbeat(store, flight, prefix="example")
        >>> heartbeat.stop()
        >>> json.loads(store.get(beat_key("example", 0)))["left"]
        True
    """

    def __init__(self, store: Any, flight: FlightRecorder, *, prefix: str) -> None:
        self.heard: dict[int, dict[str, Any]] = {}
        """What others were heard to say while all was well, for when the store is gone: one of them at a time."""
        self._stopping = threading.Event()
        voice = _Voice(weakref.ref(flight), prefix, self._stopping, self.heard)
        self._thread = threading.Thread(target=voice.run, args=(store,), name="shardrt-heartbeat", daemon=True)
        self._thread.start()
        # A runtime that nobody closes ends its heartbeat when it is collected, or with the interpreter: a thread that
        # is inside the network layer then would take the process down with it.
        self._end = weakref.finalize(self, _end, self._stopping, self._thread, _FAREWELL_SECONDS)

    def stop(self) -> None:
        """Say that this rank has left, and end. Waits for neither longer than half a second."""
        self._end()


class _Voice:
    """What the thread does. It knows the recorder weakly: a runtime that is forgotten falls silent."""

    def __init__(
        self,
        flight: weakref.ref[FlightRecorder],
        prefix: str,
        stopping: threading.Event,
        heard: dict[int, dict[str, Any]],
    ) -> None:
        self._flight = flight
        self._prefix = prefix
        self._stopping = stopping
        self._heard = heard
        self._failure: dict[str, Any] | None = None

    def run(self, store: Any) -> None:
        try:
            beats = 0
            while (interval := self._beat(store, beats)) is not None and not self._stopping.wait(interval):
                if beats == 0:  # see Note [Connecting takes its time]
                    store = _own_connection(store)
                beats += 1
            self._beat(store, None)
        except RuntimeError:  # torch's DistStoreError and DistNetworkError: the store is gone with its host
            return

    def _beat(self, store: Any, beats: int | None) -> float | None:
        """Speak, listen to one of the others, and say after how many seconds it is time again."""
        flight = self._flight()
        if flight is None:
            return None
        words = {**flight.summary(), "left": beats is None}
        store.set(beat_key(self._prefix, flight.rank), json.dumps(words))
        if beats is not None:
            rank = (flight.rank + 1 + beats % (flight.world_size - 1)) % flight.world_size
            key = beat_key(self._prefix, rank)
            found = checked_beat(store.get(key)) if store.check([key]) else None
            if found is not None:
                self._heard[rank] = found
            self._look_for_failures(store, flight)
        return INTERVAL_SECONDS * max(1.0, flight.world_size / _LARGE_WORLD)

    def _look_for_failures(self, store: Any, flight: FlightRecorder) -> None:
        """Whoever waits in the runtime hears of a failure within half a second; here it is passed on a beat later."""
        key = f"{self._prefix}/failed"
        if self._failure is not None:
            flight.peer_failed(self._failure)
        elif store.check([key]):
            note = json.loads(store.get(key))
            self._failure = note if isinstance(note, dict) else None


def _end(stopping: threading.Event, thread: threading.Thread, seconds: float) -> None:
    stopping.set()
    if thread is not threading.current_thread():
        thread.join(timeout=seconds)


def _own_connection(store: Any) -> Any:
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):  # a store that has no connection to begin with
        return store


def checked_beat(data: bytes | str) -> dict[str, Any] | None:
    """A rank's words as they were found in the store, or None if they are none.

    Example:
        >>> from shardrt.flight.heartbeat import checked_beat
        >>> checked_beat('{"time": 12.5, "under_way": []}')["time"], checked_beat("[1]")
        (12.5, None)
    """
    try:
        found = json.loads(data)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("time"), (int, float)):
        return None
    return found

"""The parent's end of the ranks' connections. See Note [Launch protocol] in :mod:`shardrt.launch`."""

from __future__ import annotations

import json
import selectors
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import attrs

from shardrt.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

_LONGEST_SOCKET_PATH = 107
PASSING_ON = ("PeerError", "CommunicationError")
"""Errors by which a rank tells of another one's failure rather than of its own."""


@attrs.define(kw_only=True)
class RankLog:
    """What has been heard from one rank."""

    rank: int
    pid: int | None = None
    result: Any = None
    finished: bool = False
    error: str | None = None
    only_passes_on: bool = False
    ended_at: float = float("inf")
    last_event: Any = None

    @property
    def last_words(self) -> str:
        """What it said last, for messages."""
        if self.pid is None:
            return "has not started"
        if self.finished:
            return "has finished"
        return "has started" if self.last_event is None else f"last said {json.dumps(self.last_event)}"

    def take(self, message: dict[str, Any]) -> None:
        """Note one message."""
        if "hello" in message:
            self.pid = message["pid"]
        elif "event" in message:
            self.last_event = message["event"]
        elif "result" in message:
            self.result, self.finished = message["result"], True
        else:
            self.error = message["error"]
            self.only_passes_on = message["type"] in PASSING_ON
            self.ended_at = time.monotonic()

    def hung_up(self) -> None:
        """Note that the connection is closed."""
        self.ended_at = min(self.ended_at, time.monotonic())

    @property
    def failed(self) -> bool:
        """Whether it said so, or hung up without a result."""
        return not self.finished and self.ended_at < float("inf")


class Listener:
    """Accepts the ranks' connections and keeps what they say."""

    def __init__(self, path: Path, ranks: int) -> None:
        if len(str(path)) > _LONGEST_SOCKET_PATH:
            raise ConfigError(
                f"the socket {str(path)!r} would have a name of {len(str(path))} characters and the system takes "
                f"{_LONGEST_SOCKET_PATH}; set TMPDIR to a shorter folder"
            )
        self.ranks = [RankLog(rank=rank) for rank in range(ranks)]
        self._selector = selectors.DefaultSelector()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen(ranks)
        self._selector.register(self._server, selectors.EVENT_READ)
        self._callers: dict[socket.socket, _Caller] = {}

    @property
    def all_started(self) -> bool:
        """Whether every rank has been heard."""
        return all(rank.pid is not None for rank in self.ranks)

    @property
    def all_finished(self) -> bool:
        """Whether every rank has sent its result."""
        return all(rank.finished for rank in self.ranks)

    @property
    def someone_failed(self) -> bool:
        """Whether a rank has failed or died."""
        return any(rank.failed for rank in self.ranks)

    def cause(self) -> RankLog | None:
        """The failed rank that the others failed because of, as far as can be told."""
        failed = sorted((rank for rank in self.ranks if rank.failed), key=lambda rank: rank.ended_at)
        if not failed or failed[0].error is None:
            # Nobody had complained before it died. Whoever dies after a first complaint was ended by torchrun.
            return failed[0] if failed else None
        return next((rank for rank in failed if rank.error is not None and not rank.only_passes_on), failed[0])

    def poll(self, seconds: float) -> list[tuple[int, Any]]:
        """Wait for news up to ``seconds``: pairs of a rank and its event, which is None for other news."""
        news: list[tuple[int, Any]] = []
        ready = self._selector.select(seconds)
        while ready:
            for key, _ in ready:
                if key.fileobj is self._server:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    news += self._read(key.fileobj)
            ready = self._selector.select(0)
        return news

    def hang_up(self) -> None:
        """Close all connections, whereupon ranks that are still there end."""
        for caller in list(self._callers):
            self._forget(caller)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.hang_up()
        self._selector.close()
        self._server.close()

    def _accept(self) -> None:
        connection, _ = self._server.accept()
        self._callers[connection] = _Caller()
        self._selector.register(connection, selectors.EVENT_READ)

    def _forget(self, connection: socket.socket) -> None:
        del self._callers[connection]
        self._selector.unregister(connection)
        connection.close()

    def _read(self, connection: socket.socket) -> list[tuple[int, Any]]:
        caller = self._callers[connection]
        try:
            chunk = connection.recv(1 << 16)
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            if caller.log is not None:
                caller.log.hung_up()
            self._forget(connection)
            return []
        *lines, caller.unread = (caller.unread + chunk).split(b"\n")
        news: list[tuple[int, Any]] = []
        for line in lines:
            message = json.loads(line)
            if caller.log is None:
                caller.log = self.ranks[message["hello"]]
            caller.log.take(message)
            news.append((caller.log.rank, message.get("event")))
        return news


@attrs.define
class _Caller:
    log: RankLog | None = None
    unread: bytes = b""

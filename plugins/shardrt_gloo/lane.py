"""A connection to every peer, over which messages travel one behind the other.

Note [Streams]: both ends of a connection queue their messages in the same order, so no message waits for a note that
its receiver is ready, as Gloo's do: bytes go as soon as the system takes them, and lie in its buffers until they are
asked for. Whoever queues a message sends what the system takes at once; the thread that waits for messages sends and
receives the rest, those that were queued behind them included. In front of each message goes a heading: ranks that make
different calls hear of it at once, and never get one another's data.

Note [Fewer wake-ups]: a thread that is woken for every packet takes the processor away from whoever computes. So the
system is asked to wake it only when there is much to read, or all that is going to come (``SO_RCVLOWAT``).
"""

from __future__ import annotations

import ctypes
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import attrs
import torch

from shardrt.errors import CommunicationError
from shardrt.protocols import Group

_HEADING = struct.Struct("<4sQQIIQ")
_MAGIC = b"srt1"
_OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce", "all_to_all", "broadcast", "barrier")
_DTYPES = tuple(sorted({str(kind) for kind in vars(torch).values() if isinstance(kind, torch.dtype)}))
_WORTH_WAKING = 512 * 1024
"""Bytes; see Note [Fewer wake-ups]."""
_AT_ONCE = 1 << 20
"""Bytes that one connection receives before it is the next one's turn."""
_LOOK_SECONDS = 0.5


@attrs.frozen
class Heading:
    """What tells messages apart."""

    operation: str
    number: int
    dtype: torch.dtype
    nbytes: int

    def packed(self, communicator: int) -> bytes:
        """As it travels."""
        kind, dtype = _OPERATIONS.index(self.operation), _DTYPES.index(str(self.dtype))
        return _HEADING.pack(_MAGIC, communicator, self.number, kind, dtype, self.nbytes)


def in_words(heading: bytes) -> str:
    """A heading for people.

    Example:
        >>> import torch
        >>> from shardrt_gloo.lane import Heading, in_words
        >>> in_words(Heading("all_gather", 7, torch.float32, 400).packed(communicator=2))
        'all_gather (number 7 of communicator 2) of 400 bytes of float32'
        >>> in_words(bytes(36))
        'something that is no message of a rank'
    """
    magic, communicator, number, kind, dtype, nbytes = _HEADING.unpack(heading)
    if magic != _MAGIC or kind >= len(_OPERATIONS) or dtype >= len(_DTYPES):
        return "something that is no message of a rank"
    name = _DTYPES[dtype].removeprefix("torch.")
    return f"{_OPERATIONS[kind]} (number {number} of communicator {communicator}) of {nbytes} bytes of {name}"


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a flat tensor, which the caller keeps alive.

    Not through NumPy: memory that it has seen can never be resized again.

    Example:
        >>> import torch
        >>> from shardrt_gloo.lane import bytes_of
        >>> len(bytes_of(torch.zeros(3, dtype=torch.bfloat16)))
        6
    """
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


Part = tuple[torch.Tensor, Callable[[], None]]
"""What is to be sent, and what is to be called when it has gone."""


class Outgoing:
    """A message to one peer."""

    def __init__(self, heading: bytes, parts: Iterator[Part]) -> None:
        """``parts`` are made when it is their turn."""
        self.done = False
        self._parts = parts
        self._views = [memoryview(heading)]
        self._begun = False
        self._tensor: torch.Tensor | None = None
        self._gone: Callable[[], None] | None = None

    def send(self, connection: socket.socket) -> int:
        """As much as the system takes at once: how many bytes that were."""
        if not self._begun:
            self._begun = True
            self._begin_part()
        sent = left = connection.sendmsg(self._views)
        while self._views and left >= len(self._views[0]):
            left -= len(self._views.pop(0))
        if self._views:
            self._views[0] = self._views[0][left:]
        else:
            gone, self._gone = self._gone, None
            if gone is not None:
                gone()
            self._begin_part()
            self.done = not self._views
        return sent

    def _begin_part(self) -> None:
        self._tensor, self._gone = next(self._parts, (None, None))
        if self._tensor is not None:
            self._views.append(bytes_of(self._tensor))


class Incoming(Protocol):
    """A message from one peer."""

    nbytes: int
    """What has not come yet."""

    def view(self) -> memoryview | None:
        """Where the next bytes go; None while there is no room for them."""
        ...

    def take(self, count: int) -> None:
        """So many have come."""
        ...


class IncomingTensor:
    """A message that goes into one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.nbytes = tensor.nbytes
        self._tensor = tensor
        self._view = bytes_of(tensor)

    def view(self) -> memoryview:
        """The rest of the tensor."""
        return self._view

    def take(self, count: int) -> None:
        """See :class:`Incoming`."""
        self.nbytes -= count
        self._view = self._view[count:]


@attrs.define(eq=False)
class _Link:
    """The connection to one peer, and what is queued on it."""

    peer: int
    connection: socket.socket
    outgoing: deque[Outgoing] = attrs.field(factory=deque)
    incoming: deque[tuple[bytes, Incoming]] = attrs.field(factory=deque)
    sending: threading.Lock = attrs.field(factory=threading.Lock)
    heading: bytearray = attrs.field(factory=lambda: bytearray(_HEADING.size))
    headed: int = 0
    """Bytes of the heading that have come."""
    polled: int = 0
    """What the system is asked to tell of."""
    low_water: int = 1
    broken: str = ""
    """Why nothing is sent any more: nobody knows how much of a message has gone."""

    def send(self) -> bool:
        """Send what the system takes; says whether it took anything."""
        sent = 0
        with self.sending:
            if self.broken:
                raise ConnectionError(self.broken)
            try:
                while self.outgoing:
                    sent += self.outgoing[0].send(self.connection)
                    if self.outgoing[0].done:
                        self.outgoing.popleft()
            except BlockingIOError:
                pass
            except BaseException as error:
                self.broken = f"sending was broken off: {type(error).__name__}: {error}"
                raise
        return sent > 0

    def hang_up(self) -> None:
        """Nothing goes out any more, and the peer hears of it."""
        with self.sending:
            self.broken = self.broken or "this rank has hung up"
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def receive(self) -> bool:
        """Take what has come, for as long as it is wanted; says whether anything had."""
        received = 0
        with suppress(BlockingIOError):
            while self.incoming and received < _AT_ONCE:
                heading, message = self.incoming[0]
                if self.headed < _HEADING.size:
                    count = self.connection.recv_into(memoryview(self.heading)[self.headed :])
                    self.headed += count
                    if self.headed == _HEADING.size and self.heading != heading:
                        raise _Unexpected(in_words(heading), in_words(bytes(self.heading)))
                else:
                    view = message.view()
                    if view is None:
                        break
                    count = self.connection.recv_into(view)
                    message.take(count)
                if not count:
                    raise ConnectionError("the connection was closed")
                received += count
                if self.headed == _HEADING.size and not message.nbytes:
                    self.headed = 0
                    self.incoming.popleft()
        return received > 0

    def wanted(self) -> int:
        """What to wait for."""
        reads = bool(self.incoming) and (self.headed < _HEADING.size or self.incoming[0][1].view() is not None)
        if reads:
            left = self.incoming[0][1].nbytes if self.headed == _HEADING.size else 0
            low_water = _WORTH_WAKING if left >= _WORTH_WAKING else 1
            if low_water != self.low_water:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
                self.low_water = low_water
        return (select.POLLIN if reads else 0) | (select.POLLOUT if self.outgoing else 0)


class _Unexpected(Exception):
    """Another message than the expected one has come."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected} and found {found}")


class Lane:
    """Messages between this rank and all its peers, in one order. See Note [Streams]."""

    def __init__(self, group: Group, connections: Mapping[int, socket.socket], *, progress: Callable[[], None]) -> None:
        self._rank = group.rank
        self._number = group.number
        self._timeout = group.timeout
        self._progress = progress
        self._links = {peer: _Link(peer, connection) for peer, connection in connections.items()}
        self._by_file = {link.connection.fileno(): link for link in self._links.values()}
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._aborted = False
        self._failed = False

    def queue(
        self,
        operation: str,
        number: int,
        *,
        sends: Sequence[tuple[int, torch.dtype, int, Iterator[Part]]],
        receives: Sequence[tuple[int, torch.dtype, Incoming]],
    ) -> Callable[[], bool]:
        """Queue messages behind all earlier ones and send what the system takes; the result tells whether all are done.

        Sends have a peer, a dtype, a number of bytes, and the parts; empty messages do not travel. After a failure
        nothing is queued: what is sent may belong to somebody else by now.
        """
        if self._failed:
            return lambda: False
        waiting: list[Outgoing] = []
        expected: list[Incoming] = []
        for peer, dtype, message in receives:
            if message.nbytes:
                heading = Heading(operation, number, dtype, message.nbytes).packed(self._number)
                self._links[peer].incoming.append((heading, message))
                expected.append(message)
        for peer, dtype, nbytes, parts in sends:
            if nbytes:
                outgoing = Outgoing(Heading(operation, number, dtype, nbytes).packed(self._number), parts)
                waiting.append(outgoing)
                link = self._links[peer]
                link.outgoing.append(outgoing)
                with suppress(OSError):  # whoever waits for it meets the error again
                    link.send()
        self.wake()
        return lambda: all(message.nbytes == 0 for message in expected) and all(one.done for one in waiting)

    def drive(self, operation: str, number: int, is_done: Callable[[], bool]) -> None:
        """Send and receive until that is so. One thread at a time. After a failure peers are hung up on: no message
        is ever completed with what came later."""
        try:
            self._drive(operation, number, is_done)
        except BaseException:
            self._failed = True
            for link in self._links.values():
                link.hang_up()
            raise

    def _drive(self, operation: str, number: int, is_done: Callable[[], bool]) -> None:
        moved_at = time.monotonic()
        links: Sequence[_Link] = list(self._links.values())
        while not is_done():
            moved = False
            for link in links:
                try:
                    moved = link.send() or moved
                    moved = link.receive() or moved
                except (OSError, _Unexpected) as error:
                    raise self._failure(operation, number, link.peer, error) from error
            now = time.monotonic()
            if moved:
                moved_at = now
                self._progress()
            elif now > moved_at + self._timeout:
                raise self._too_late(operation, number)
            if self._aborted or self._failed:
                raise CommunicationError(f"rank {self._rank}: {self._described(operation, number)} was given up")
            links = self._links_that_move() if not is_done() else ()

    def wake(self) -> None:
        """Let the thread that waits look again."""
        with suppress(OSError):
            self._waker.send(b"w")

    def abort(self) -> None:
        """End whatever is under way."""
        self._aborted = True
        self.wake()

    def close(self) -> None:
        """Hang up. What was sent still arrives."""
        for link in self._links.values():
            link.connection.close()
        self._woken.close()
        self._waker.close()

    def _links_that_move(self) -> list[_Link]:
        """Wait until the system can go on with some of them."""
        for file, link in self._by_file.items():
            wanted = link.wanted()
            if wanted != link.polled:
                if wanted:
                    self._poll.register(file, wanted)
                else:
                    self._poll.unregister(file)
                link.polled = wanted
        found = self._poll.poll(1e3 * min(_LOOK_SECONDS, self._timeout))
        woken = self._woken.fileno()
        links = [self._by_file[file] for file, _ in found if file != woken]
        if len(links) < len(found):
            with suppress(BlockingIOError):
                self._woken.recv(4096)
            return list(self._links.values())
        return links or list(self._links.values())

    def _described(self, operation: str, number: int) -> str:
        return f"{operation} (number {number} of communicator {self._number})"

    def _failure(self, operation: str, number: int, peer: int, error: Exception) -> CommunicationError:
        if isinstance(error, _Unexpected):
            what = (
                f"{error}; the ranks make different calls: let all ranks make the same calls in the same order, on "
                "tensors of the same sizes"
            )
        else:
            what = f"failed: {error}; see why rank {peer} ended"
        failure = CommunicationError(f"rank {self._rank}: {self._described(operation, number)} with rank {peer} {what}")
        failure.ranks = (peer,)
        return failure

    def _too_late(self, operation: str, number: int) -> CommunicationError:
        late = [link.peer for link in self._links.values() if link.incoming or link.outgoing]
        names = f"rank {late[0]}" if len(late) == 1 else f"ranks {', '.join(map(str, late))}"
        stuck = "is stuck, or makes" if len(late) == 1 else "are stuck, or make"
        failure = CommunicationError(
            f"rank {self._rank}: {self._described(operation, number)} with {names} took longer than "
            f"{self._timeout:g} s; {names} {stuck} other calls than this rank, or raise Runtime(timeout=...)"
        )
        failure.ranks = tuple(late)
        return failure

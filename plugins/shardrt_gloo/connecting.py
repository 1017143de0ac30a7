"""Ranks connect to one another, each with each: connections of a communicator's own, beside those that Gloo has.

Where a rank listens, and the secret that whoever calls must know, travel over the control channel, which only ranks of
the run read. A caller who does not know it is hung up on, and whoever answers must know the caller's. Ranks then tell
one another whether all calls came through: either all use these connections, or none does.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import attrs

from shardrt.protocols import Group
from shardrt_gloo.addresses import addresses_of_this_rank

_PATIENCE_SECONDS = 20.0
_TRY_SECONDS = 5.0
"""For one address of a peer, which may have others; and for a caller to say who it is."""
_SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sQII")
"""The secret of the rank that is called; the communicator, the lane, and the rank that calls."""

Lane = dict[int, socket.socket]
"""A connection to every peer."""


class _CannotConnectError(Exception):
    """A rank could not be reached, or did not call."""


@attrs.frozen
class Connected:
    """What came of it: lanes on all ranks, or on no rank and why."""

    lanes: Sequence[Lane]
    reason: str = ""


def connect_ranks(group: Group, *, lanes: int) -> Connected:
    """Connect every rank with every other, so many times. All ranks call it at one point, and get the same answer."""
    secret = secrets.token_bytes(_SECRET_BYTES)
    made: list[Lane] = [{} for _ in range(lanes)]
    reason = ""
    with _listening(group.world_size * lanes) as listeners:
        places = [list(listener.getsockname()[:2]) for listener in listeners]
        told = {"secret": secret.hex(), "places": places}
        peers = group.control.exchange(f"gloo places {group.number}", told)
        try:
            _connect(group, listeners, secret, peers, made)
        except (_CannotConnectError, OSError) as error:
            reason = str(error)
        try:
            reasons = group.control.exchange(f"gloo connected {group.number}", reason)
        except BaseException:
            _hang_up(made)
            raise
    failed = [f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why]
    if failed:
        _hang_up(made)
        return Connected([], failed[0])
    return Connected(made)


@contextmanager
def _listening(callers: int) -> Iterator[list[socket.socket]]:
    listeners: list[socket.socket] = []
    try:
        for address in addresses_of_this_rank():
            with suppress(OSError):
                listeners.append(socket.create_server((address, 0), family=_family(address), backlog=callers))
        yield listeners
    finally:
        for listener in listeners:
            listener.close()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _connect(
    group: Group,
    listeners: Sequence[socket.socket],
    secret: bytes,
    peers: Sequence[Mapping[str, Any]],
    made: Sequence[Lane],
) -> None:
    """Call all lower ranks, while a thread answers all higher ones."""
    deadline = time.monotonic() + min(_PATIENCE_SECONDS, group.timeout / 2)
    answering = _Answering(group, listeners, secret, peers, deadline, lanes=len(made))
    thread = threading.Thread(target=answering.run, name=f"shardrt-gloo-{group.number}-answering", daemon=True)
    thread.start()
    try:
        for lane, connections in enumerate(made):
            for rank in range(group.rank):
                hello = _HELLO.pack(bytes.fromhex(peers[rank]["secret"]), group.number, lane, group.rank)
                connections[rank] = _call(rank, peers[rank]["places"], hello, secret, deadline)
    except BaseException:
        answering.give_up = True
        raise
    finally:
        thread.join()
        for (lane, rank), connection in answering.answered.items():
            made[lane][rank] = connection
    missing = {rank for lane in made for rank in range(group.world_size) if rank != group.rank and rank not in lane}
    if missing:
        raise _CannotConnectError(f"rank {min(missing)} has not called within {_PATIENCE_SECONDS:g} s")
    for connection in (connection for lane in made for connection in lane.values()):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)


def _call(rank: int, places: Sequence[Sequence[Any]], hello: bytes, expected: bytes, deadline: float) -> socket.socket:
    tried = []
    for address, port in places:
        try:
            made = socket.create_connection((address, port), timeout=_patience(deadline))
        except OSError as error:
            tried.append(f"{address} port {port}: {error}")
            continue
        try:
            made.sendall(hello)
            if hmac.compare_digest(_read(made, _SECRET_BYTES), expected):
                return made
            tried.append(f"{address} port {port}: another program answers")
        except OSError as error:
            tried.append(f"{address} port {port}: {error}")
        made.close()
    raise _CannotConnectError(f"rank {rank} cannot be reached: {'; '.join(tried) or 'it listens nowhere'}")


class _Answering:
    """Takes the calls of higher ranks until all have come; strangers are hung up on."""

    def __init__(
        self,
        group: Group,
        listeners: Sequence[socket.socket],
        secret: bytes,
        peers: Sequence[Mapping[str, Any]],
        deadline: float,
        *,
        lanes: int,
    ) -> None:
        self.answered: dict[tuple[int, int], socket.socket] = {}
        """By lane and rank."""
        self.give_up = False
        self._group = group
        self._listeners = listeners
        self._secret = secret
        self._peers = peers
        self._deadline = deadline
        self._wanted = lanes * (group.world_size - 1 - group.rank)

    def run(self) -> None:
        """In a thread of its own, which ends by itself."""
        with selectors.DefaultSelector() as selector:
            for listener in self._listeners:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
            while len(self.answered) < self._wanted and not self.give_up and time.monotonic() < self._deadline:
                for key, _ in selector.select(timeout=0.2):
                    with suppress(OSError):
                        caller, _ = key.fileobj.accept()  # type: ignore[union-attr]
                        self._answer(caller)

    def _answer(self, caller: socket.socket) -> None:
        caller.settimeout(_patience(self._deadline))
        try:
            secret, number, lane, rank = _HELLO.unpack(_read(caller, _HELLO.size))
            known = hmac.compare_digest(secret, self._secret) and number == self._group.number
            if known and self._group.rank < rank < self._group.world_size and (lane, rank) not in self.answered:
                caller.sendall(bytes.fromhex(self._peers[rank]["secret"]))
                self.answered[lane, rank] = caller
                return
        except OSError:
            pass
        caller.close()


def _read(connection: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        more = connection.recv(nbytes - len(found))
        if not more:
            raise ConnectionError("it hung up")
        found += more
    return found


def _patience(deadline: float) -> float:
    return min(_TRY_SECONDS, max(deadline - time.monotonic(), 0.001))


def _hang_up(lanes: Sequence[Lane]) -> None:
    for connection in (connection for lane in lanes for connection in lane.values()):
        connection.close()

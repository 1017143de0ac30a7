"""Ranks connect to one another, each with each: connections of a communicator's own, beside those that Gloo has.

Where a rank listens, and the secret that whoever calls must know, travel over the control channel, which only ranks of
the run read. A caller proves that it knows the secret of the rank it calls, and whoever answers that it knows the
caller's; the secrets themselves are not told. Whoever cannot is hung up on. Ranks then tell one another whether all
calls came through: either all use these connections, or none does.
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
_MORE_FOR_EACH_RANK = 0.5
"""Seconds: many ranks may share a processor."""
_TRY_SECONDS = 5.0
"""For one address of a peer, which has others; and for a caller to say who it is."""
_LOOK_SECONDS = 0.2
_SECRET_BYTES = 16
_PROOF = "sha256"
_PROOF_BYTES = 32
_CALLER = struct.Struct(f"<{_SECRET_BYTES}sQII")
"""A number that was never used before; the communicator, the lane, and the rank that calls."""
_HELLO_BYTES = _CALLER.size + _PROOF_BYTES

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
        except BaseException:
            _hang_up(made)
            raise
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
    patience = min(_PATIENCE_SECONDS + _MORE_FOR_EACH_RANK * group.world_size, group.timeout / 2)
    deadline = time.monotonic() + patience
    answering = _Answering(group, listeners, secret, peers, deadline, lanes=len(made))
    thread = threading.Thread(target=answering.run, name=f"shardrt-gloo-{group.number}-answering", daemon=True)
    thread.start()
    try:
        for lane, connections in enumerate(made):
            for rank in range(group.rank):
                caller = _CALLER.pack(secrets.token_bytes(_SECRET_BYTES), group.number, lane, group.rank)
                hello = caller + proof(peers[rank]["secret"], b"call", caller)
                expected = proof(secret.hex(), b"answer", caller)
                connections[rank] = _call(rank, peers[rank]["places"], hello, expected, deadline)
    except BaseException:
        answering.give_up = True
        raise
    finally:
        thread.join()
        for (lane, rank), connection in answering.answered.items():
            made[lane][rank] = connection
    missing = {rank for lane in made for rank in range(group.world_size) if rank != group.rank and rank not in lane}
    if missing:
        raise _CannotConnectError(f"rank {min(missing)} has not called within {patience:g} s")
    for connection in (connection for lane in made for connection in lane.values()):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)


def proof(secret: str, purpose: bytes, caller: bytes) -> bytes:
    """That somebody knows a secret.

    Example:
        >>> from shardrt_gloo.connecting import proof
        >>> proof("00ff", b"call", b"x") == proof("00ff", b"answer", b"x")
        False
    """
    return hmac.digest(bytes.fromhex(secret), purpose + caller, _PROOF)


def _call(rank: int, places: Sequence[Sequence[Any]], hello: bytes, expected: bytes, deadline: float) -> socket.socket:
    tried = []
    for number, (address, port) in enumerate(places, start=1):
        # The last place may use all the time that is left: a rank that is slow to answer is no stranger.
        until = deadline if number == len(places) else min(deadline, time.monotonic() + _TRY_SECONDS)
        try:
            made = socket.create_connection((address, port), timeout=_left(until))
        except OSError as error:
            tried.append(f"{address} port {port}: {error}")
            continue
        try:
            made.sendall(hello)
            if hmac.compare_digest(_read(made, len(expected), until), expected):
                return made
            tried.append(f"{address} port {port}: another program answers")
        except OSError as error:
            tried.append(f"{address} port {port}: {error}")
        made.close()
    raise _CannotConnectError(f"rank {rank} cannot be reached: {'; '.join(tried) or 'it listens nowhere'}")


@attrs.define(eq=False)
class _Caller:
    """Somebody who has called, and what it has said so far."""

    connection: socket.socket
    until: float
    said: bytes = b""


class _Answering:
    """Takes the calls of higher ranks until all have come; strangers are hung up on, and hold up nobody."""

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
        self._secret = secret.hex()
        self._peers = peers
        self._deadline = deadline
        self._lanes = lanes
        self._callers: dict[socket.socket, _Caller] = {}

    def run(self) -> None:
        """In a thread of its own, which ends by itself."""
        wanted = self._lanes * (self._group.world_size - 1 - self._group.rank)
        with selectors.DefaultSelector() as selector:
            for listener in self._listeners:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
            while len(self.answered) < wanted and not self.give_up and time.monotonic() < self._deadline:
                for key, _ in selector.select(timeout=_LOOK_SECONDS):
                    with suppress(BlockingIOError):
                        self._serve(selector, key.fileobj)  # type: ignore[arg-type]
                for caller in [one for one in self._callers.values() if time.monotonic() > one.until]:
                    self._hang_up(selector, caller)
            for caller in list(self._callers.values()):
                self._hang_up(selector, caller)

    def _serve(self, selector: selectors.BaseSelector, ready: socket.socket) -> None:
        if ready in self._listeners:
            connection, _ = ready.accept()
            connection.setblocking(False)
            self._callers[connection] = _Caller(connection, time.monotonic() + _TRY_SECONDS)
            selector.register(connection, selectors.EVENT_READ)
            return
        caller = self._callers[ready]
        try:
            more = ready.recv(_HELLO_BYTES - len(caller.said))
        except BlockingIOError:
            raise
        except OSError:
            more = b""
        caller.said += more
        if not more:
            self._hang_up(selector, caller)
        elif len(caller.said) == _HELLO_BYTES:
            place = self._recognised(caller.said)
            if place is None or not self._answer(caller, place):
                self._hang_up(selector, caller)
            else:
                selector.unregister(ready)
                del self._callers[ready]

    def _recognised(self, hello: bytes) -> tuple[int, int] | None:
        """The lane and rank of a peer that may call now."""
        told, given = hello[: _CALLER.size], hello[_CALLER.size :]
        _, number, lane, rank = _CALLER.unpack(told)
        known = hmac.compare_digest(proof(self._secret, b"call", told), given) and number == self._group.number
        expected = self._group.rank < rank < self._group.world_size and lane < self._lanes
        return (lane, rank) if known and expected and (lane, rank) not in self.answered else None

    def _answer(self, caller: _Caller, place: tuple[int, int]) -> bool:
        answer = proof(self._peers[place[1]]["secret"], b"answer", caller.said[: _CALLER.size])
        try:
            caller.connection.sendall(answer)
        except OSError:
            return False
        self.answered[place] = caller.connection
        return True

    def _hang_up(self, selector: selectors.BaseSelector, caller: _Caller) -> None:
        selector.unregister(caller.connection)
        del self._callers[caller.connection]
        caller.connection.close()


def _read(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    found = b""
    while len(found) < nbytes:
        connection.settimeout(_left(deadline))
        more = connection.recv(nbytes - len(found))
        if not more:
            raise ConnectionError("it hung up")
        found += more
    return found


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _hang_up(lanes: Sequence[Lane]) -> None:
    for connection in (connection for lane in lanes for connection in lane.values()):
        connection.close()

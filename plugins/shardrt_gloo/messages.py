"""Point-to-point messages over a Gloo process group: all posted at once, then waited for, with errors that say who.

Note [Receives first]: a large exchange in which both sides post the send first runs half duplex, because the note
"ready to receive" queues behind the data. So every rank posts all receives before any send.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch

from shardrt.comm import Traffic
from shardrt.errors import CommunicationError
from shardrt.protocols import Group

Message = tuple[int, torch.Tensor]
"""A peer's rank and what to send to it or where to receive from it."""


class Posts(Protocol):
    """Whatever carries messages."""

    def post(
        self, operation: str, number: int, *, sends: Sequence[Message], receives: Sequence[Message]
    ) -> Callable[[], None]:
        """Start all messages of an operation's part; the returned call waits for them."""
        ...

    def close_connections(self, peer: int) -> None:
        """End waits that nobody wants any more."""
        ...


class Messages:
    """Posts the messages of one communicator's operations."""

    def __init__(self, group: Group, traffic: Traffic) -> None:
        self._group = group
        self._traffic = traffic
        self._limit = timedelta(seconds=group.timeout)

    def post(
        self, operation: str, number: int, *, sends: Sequence[Message], receives: Sequence[Message]
    ) -> Callable[[], None]:
        """Start all messages of an operation's part, receives first; the returned call waits for them."""
        pg = self._group.process_group
        # Not dist.isend and dist.irecv, which look up the group and check it again for each of many messages.
        posted = [
            (peer, "from", self._start(pg.recv, operation, number, "from", peer, tensor))
            for peer, tensor in receives
            if tensor.numel()
        ]
        posted += [
            (peer, "to", self._start(pg.send, operation, number, "to", peer, tensor))
            for peer, tensor in sends
            if tensor.numel()
        ]
        self._traffic.count(
            operation,
            sent=sum(tensor.nbytes for _, tensor in sends),
            received=sum(tensor.nbytes for _, tensor in receives),
        )
        return lambda: self._finish(operation, number, posted)

    def close_connections(self, peer: int) -> None:
        """End waits that nobody wants any more: Gloo closes a group's connections when a wait of it times out."""
        with suppress(RuntimeError):
            never = self._group.process_group.recv([torch.zeros(1)], peer, 0)
            never.wait(timedelta(milliseconds=1))

    def _start(
        self, start: Callable[..., Any], operation: str, number: int, direction: str, peer: int, tensor: torch.Tensor
    ) -> Any:
        tag = self._tag(operation, number, tensor)
        began = time.monotonic()
        try:
            return start([torch.view_as_real(tensor) if tensor.is_complex() else tensor], peer, tag)
        except RuntimeError as error:
            raise self._failure(operation, number, direction, peer, began, error) from error

    def _finish(self, operation: str, number: int, posted: Sequence[tuple[int, str, Any]]) -> None:
        first = time.monotonic()
        limit = self._limit
        for peer, direction, work in posted:
            began = time.monotonic()
            try:
                work.wait(limit)
            except RuntimeError as error:
                raise self._failure(operation, number, direction, peer, began, error) from error
            limit = timedelta(seconds=max(first + self._group.timeout - time.monotonic(), 0.001))

    def _failure(
        self, operation: str, number: int, direction: str, peer: int, began: float, error: RuntimeError
    ) -> CommunicationError:
        """Gloo's errors say neither what was going on nor with whom."""
        took = time.monotonic() - began
        what = (
            f"took longer than {self._group.timeout:g} s; rank {peer} is stuck, or makes other calls than this rank, "
            "or raise Runtime(timeout=...)"
            if took > 0.9 * self._group.timeout
            else f"failed after {took:.1f} s: {_reason(error)}; see why rank {peer} ended"
        )
        failure = CommunicationError(
            f"rank {self._group.rank}: {operation} (number {number} of communicator {self._group.number}) "
            f"{direction} rank {peer} {what}"
        )
        failure.ranks = (peer,)
        return failure

    def _tag(self, operation: str, number: int, tensor: torch.Tensor) -> int:
        """Only messages of the same operation, of the same number and size, ever meet.

        Ranks that make different calls then end in a timeout, and never in one another's data.
        """
        words = f"{self._group.number}/{number}/{operation}/{tensor.dtype}/{tensor.numel()}"
        return zlib.crc32(words.encode()) & 0x7FFF_FFFF


def _reason(error: RuntimeError) -> str:
    """What Gloo says, without where in its code it says so and what it wishes its reader."""
    first = str(error).splitlines()[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", first).partition("GLHF")[0].strip().rstrip(".")

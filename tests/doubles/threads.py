"""A communicator between threads of one process, with any capabilities, that refuses whatever they do not declare.

Note [Late and poisoned]: results arrive as late as they may, and not only where they are waited for: a wait delivers
everything issued before, in order, as a wire would. Until then every output holds rubbish. So a fallback that reads
too early, or that lends one piece of scratch to two operations, gets wrong numbers here every time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from shardrt.comm import Capabilities, Traffic


class UndeclaredUse(AssertionError):
    """The communicator was asked for something that its capabilities do not declare."""


class Switchboard:
    """What the threads share: everyone's part of each operation, by its number."""

    def __init__(self, world_size: int, seconds: float = 20.0) -> None:
        self.world_size = world_size
        self.seconds = seconds
        self.parts: dict[tuple[str, int], dict[int, Any]] = {}
        self.changed = threading.Condition()

    def post(self, kind: str, number: int, rank: int, part: Any) -> None:
        with self.changed:
            self.parts.setdefault((kind, number), {})[rank] = part
            self.changed.notify_all()

    def collect(self, kind: str, number: int) -> list[Any]:
        with self.changed:
            found = self.changed.wait_for(
                lambda: len(self.parts.get((kind, number), ())) == self.world_size, self.seconds
            )
            if not found:
                raise AssertionError(f"{kind} {number}: only ranks {sorted(self.parts[kind, number])} issued it")
            return [self.parts[kind, number][rank] for rank in range(self.world_size)]


@attrs.define(eq=False)
class _Operation:
    number: int
    name: str
    deliver: Callable[[list[Any]], None]


class ThreadCommunicator:
    """One rank's end."""

    name = "threads"

    def __init__(self, board: Switchboard, rank: int, capabilities: Capabilities) -> None:
        self.board = board
        self.rank = rank
        self.world_size = board.world_size
        self.capabilities = capabilities
        self.traffic = Traffic()
        self.calls: list[tuple[str, int]] = []
        """Operation and address of its buffer."""
        self._pending: list[_Operation] = []
        self._issued = 0
        self._exchanged = 0

    def reduce_scatter(self, buffer: Any, splits: Sequence[int], *, output: Any = None, average: bool = False) -> Any:
        self._check("reduce_scatter", buffer, splits, average=average)
        own = buffer.split_with_sizes(list(splits))[self.rank]
        snapshot = buffer.clone()
        result = own if output is None else output
        _poison(buffer if output is None else output)

        def deliver(parts: list[Any]) -> None:
            runs = [part.split_with_sizes(list(splits))[self.rank] for part in parts]
            result.copy_(_reduced(runs, "sum", average))

        return self._issue("reduce_scatter", buffer, snapshot, deliver)

    def all_gather(self, buffer: Any, splits: Sequence[int]) -> Any:
        self._check("all_gather", buffer, splits)
        runs = buffer.split_with_sizes(list(splits))
        snapshot = runs[self.rank].clone()
        _poison(buffer)

        def deliver(parts: list[Any]) -> None:
            for run, part in zip(runs, parts, strict=True):
                run.copy_(part)

        return self._issue("all_gather", buffer, snapshot, deliver)

    def all_reduce(self, buffer: Any, *, op: str = "sum", average: bool = False) -> Any:
        self._check("all_reduce", buffer, average=average)
        snapshot = buffer.clone()
        _poison(buffer)
        return self._issue("all_reduce", buffer, snapshot, lambda parts: buffer.copy_(_reduced(parts, op, average)))

    def all_to_all(self, received: Sequence[Any], sent: Sequence[Any]) -> Any:
        assert len(received) == len(sent) == self.world_size
        for piece in (*received, *sent):
            self._check("all_to_all", piece)
        support = self.capabilities.all_to_all
        assert support is not None
        if not support.uneven and len({piece.numel() for piece in (*received, *sent)}) > 1:
            raise UndeclaredUse("all_to_all of uneven pieces")
        snapshot = [piece.clone() for piece in sent]
        for piece in received:
            _poison(piece)

        def deliver(parts: list[Any]) -> None:
            for piece, part in zip(received, parts, strict=True):
                assert piece.numel() == part[self.rank].numel()
                piece.copy_(part[self.rank])

        return self._issue("all_to_all", sent[0], snapshot, deliver)

    def broadcast(self, buffer: Any, source: int) -> Any:
        self._check("broadcast", buffer)
        snapshot = buffer.clone()
        _poison(buffer)
        return self._issue("broadcast", buffer, snapshot, lambda parts: buffer.copy_(parts[source]))

    def barrier(self) -> None:
        self.exchange("barrier", None)

    def exchange(self, topic: str, value: Any) -> list[Any]:
        self._exchanged += 1
        self.board.post("exchange", self._exchanged, self.rank, (topic, value))
        found = self.board.collect("exchange", self._exchanged)
        assert {each for each, _ in found} == {topic}
        return [value for _, value in found]

    def close(self) -> None:
        self.calls.append(("close", 0))

    def _check(
        self, operation: str, buffer: Any, splits: Sequence[int] | None = None, *, average: bool = False
    ) -> None:
        support = getattr(self.capabilities, operation)
        dtype = str(buffer.dtype).removeprefix("torch.")
        if support is None or not support.takes(dtype, world_size=self.world_size):
            raise UndeclaredUse(f"{operation} of {dtype} with {self.world_size} ranks")
        if average and not self.capabilities.average:
            raise UndeclaredUse(f"{operation} with average")
        if splits is not None and not support.uneven and len(set(splits)) > 1:
            raise UndeclaredUse(f"{operation} of uneven runs {list(splits)}")
        assert buffer.dim() == 1 and buffer.is_contiguous()
        assert splits is None or (len(splits) == self.world_size and sum(splits) == buffer.numel())

    def _issue(self, name: str, buffer: Any, snapshot: Any, deliver: Callable[[list[Any]], None]) -> Any:
        self._issued += 1
        self.calls.append((name, buffer.data_ptr()))
        self.board.post("operation", self._issued, self.rank, (name, snapshot))
        operation = _Operation(self._issued, name, deliver)
        self._pending.append(operation)
        return _ThreadWork(self, operation)

    def deliver_all(self) -> None:
        """See Note [Late and poisoned]."""
        while self._pending:
            operation = self._pending.pop(0)
            parts = self.board.collect("operation", operation.number)
            names = {name for name, _ in parts}
            assert names == {operation.name}, f"ranks issue different operations: {names}"
            operation.deliver([part for _, part in parts])


class _ThreadWork:
    def __init__(self, communicator: ThreadCommunicator, operation: _Operation) -> None:
        self.communicator, self.operation = communicator, operation

    def wait(self) -> None:
        if self.operation in self.communicator._pending:
            self.communicator.deliver_all()


def run_threads(
    world_size: int, capabilities: Capabilities, function: Callable[[ThreadCommunicator], Any]
) -> list[Any]:
    """Call the function once per rank, in threads; its answers in rank order, or the first failure."""
    board = Switchboard(world_size)
    answers: list[Any] = [None] * world_size
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            answers[rank] = function(ThreadCommunicator(board, rank, capabilities))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return answers


def _reduced(parts: Sequence[Any], op: str, average: bool) -> Any:
    total = parts[0].clone()
    for part in parts[1:]:
        if op == "sum":
            total = total + part
        else:
            total = torch.maximum(total, part) if op == "max" else torch.minimum(total, part)
    return total / len(parts) if average else total


def _poison(tensor: Any) -> None:
    tensor.view(torch.uint8).fill_(0xA5)

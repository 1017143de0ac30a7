"""Collectives made of point-to-point messages.

Note [Why not Gloo's own collectives]: its reduce-scatter is an all-reduce and a copy, and its exchanges run half duplex
(Note [Receives first]). Here each byte travels once, in both directions at once, and runs may be uneven without
padding. Messages with a tag of their own also keep clear of the numbering of Gloo's collectives: another thread may run
DDP on the same process group meanwhile.

Note [Posted by the caller]: an operation is a generator that stops once, when its first messages are posted. While
nothing is under way the caller goes that far itself, so that bytes travel while the thread wakes up, which takes as
long as moving some hundred thousand of them. Posting does not wait for anybody. The thread does the rest, and all of
it where operations queue up. What fails is raised by ``wait``, wherever it failed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardrt.comm import Capabilities, Traffic
from shardrt.comm.checks import (
    check_all_to_all,
    check_flat,
    check_pieces,
    check_reduction,
    check_runs,
    check_source,
)
from shardrt.comm.thread import OperationThread, ThreadedWork
from shardrt.comm.works import HandedOverWork
from shardrt.errors import ConfigError
from shardrt.protocols import Group, ReduceOp, Work
from shardrt_gloo.chunks import SideBySide, cut_into_chunks, even_chunk
from shardrt_gloo.messages import Message, Messages
from shardrt_gloo.sums import Sums, in_float32

_SMALL_BYTES = 4096
"""Up to here a message costs its latency, and its size nothing."""
Steps = Iterator[None]
"""An operation; see Note [Posted by the caller]."""


class GlooCommunicator:
    """See :class:`shardrt.protocols.Communicator`. ``chunk_mb`` bounds the memory that a reduction needs."""

    name = "gloo"
    capabilities = Capabilities(concurrent=True)

    def __init__(self, group: Group, *, chunk_mb: float = 8.0) -> None:
        if not chunk_mb > 0:
            raise ConfigError(f"gloo option chunk_mb must be above 0, got {chunk_mb!r}")
        self.rank = group.rank
        self.world_size = group.world_size
        self.traffic = Traffic()
        self._group = group
        self._issued = 0
        self._running = 0
        self._peers = [rank for rank in range(group.world_size) if rank != group.rank]
        self._scratch_bytes = int(chunk_mb * 2**20)
        self._arrivals: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._messages = Messages(group, self.traffic)
        self._sums = Sums(group.rank)
        self._laid = SideBySide()
        self._last: ThreadedWork | None = None
        self._thread = self._make_thread()
        self._second_thread: OperationThread | None = None

    def reduce_scatter(
        self,
        buffer: torch.Tensor,
        splits: Sequence[int],
        *,
        output: torch.Tensor | None = None,
        average: bool = False,
    ) -> ThreadedWork:
        """Sum or average each run onto its owner."""
        check_runs("reduce_scatter", buffer, splits, self.world_size, self.rank, output=output)
        check_reduction("reduce_scatter", buffer, "sum", average, self.rank)
        runs = torch.split(buffer, list(splits))
        result = runs[self.rank] if output is None else output
        return self._reduce_scatter([[run] for run in runs], result, average, in_output=output is not None)

    def reduce_scatter_pieces(
        self, pieces: Sequence[torch.Tensor], splits: Sequence[int], *, output: torch.Tensor, average: bool = False
    ) -> ThreadedWork:
        """Sum or average each run, sent from the pieces it is in."""
        runs = check_pieces("reduce_scatter", pieces, splits, self.world_size, self.rank, output=output)
        check_reduction("reduce_scatter", output, "sum", average, self.rank)
        return self._reduce_scatter(runs, output, average, in_output=True)

    def _reduce_scatter(
        self, runs: Sequence[Sequence[torch.Tensor]], result: torch.Tensor, average: bool, *, in_output: bool
    ) -> ThreadedWork:
        return self._submit(
            "reduce_scatter",
            self._reduce_runs("reduce_scatter", runs, result, "sum", average, in_output=in_output),
            sum(piece.nbytes for run in runs for piece in run),
        )

    def all_gather(self, buffer: torch.Tensor, splits: Sequence[int]) -> ThreadedWork:
        """Copy each run from its owner to everyone."""
        check_runs("all_gather", buffer, splits, self.world_size, self.rank)
        runs = torch.split(buffer, list(splits))
        return self._submit("all_gather", self._spread_runs("all_gather", runs), buffer.nbytes)

    def all_gather_from(self, own: torch.Tensor, buffer: torch.Tensor, splits: Sequence[int]) -> ThreadedWork:
        """Copy each run from its owner to everyone, this rank's from where it is."""
        check_runs("all_gather", buffer, splits, self.world_size, self.rank, output=own)
        runs = torch.split(buffer, list(splits))
        return self._submit("all_gather", self._spread_runs("all_gather", runs, own), buffer.nbytes)

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = "sum", average: bool = False) -> Work:
        """Reduce an even run on each rank, then gather the runs: the same bits everywhere."""
        check_flat("all_reduce", buffer, self.rank)
        check_reduction("all_reduce", buffer, op, average, self.rank)
        return self._all_reduce("all_reduce", buffer, op, average)

    def all_to_all(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> ThreadedWork:
        """Exchange pairwise."""
        check_all_to_all(received, sent, self.world_size, self.rank)

        def steps() -> Steps:
            finish = self._post(
                "all_to_all",
                sends=[(peer, sent[peer]) for peer in self._peers],
                receives=[(peer, received[peer]) for peer in self._peers],
            )
            yield
            received[self.rank].copy_(sent[self.rank])
            finish()

        return self._submit("all_to_all", steps(), sum(piece.nbytes for piece in sent))

    def broadcast(self, buffer: torch.Tensor, source: int) -> ThreadedWork:
        """Down a binomial tree: each round doubles the ranks that have the data."""
        check_flat("broadcast", buffer, self.rank)
        check_source("broadcast", source, self.world_size, self.rank)
        return self._submit("broadcast", self._broadcast(buffer, source), buffer.nbytes)

    def barrier(self) -> None:
        """An all-reduce of one element."""
        self._all_reduce("barrier", torch.zeros(1), "sum", False).wait()

    def exchange(self, topic: str, value: Any) -> list[Any]:
        """Small JSON values, over the control channel."""
        return self._group.control.exchange(topic, value)

    def close(self) -> None:
        """End the threads; the process group stays."""
        self._thread.close()
        if self._second_thread is not None:
            self._second_thread.close()

    def _all_reduce(self, operation: str, buffer: torch.Tensor, op: ReduceOp, average: bool) -> Work:
        if buffer.nbytes <= _SMALL_BYTES and not in_float32(buffer.dtype, op):
            return self._all_reduce_at_once(operation, buffer, op, average)
        share, rest = divmod(buffer.numel(), self.world_size)
        runs = torch.split(buffer, [share + (rank < rest) for rank in range(self.world_size)])

        def steps() -> Steps:
            yield from self._reduce_runs(operation, [[run] for run in runs], runs[self.rank], op, average)
            for _ in self._spread_runs(operation, runs):
                pass

        return self._submit(operation, steps(), buffer.nbytes)

    def _all_reduce_at_once(self, operation: str, buffer: torch.Tensor, op: ReduceOp, average: bool) -> Work:
        """Everyone sends everything to everyone: one message time instead of two.

        The thread only posts the messages and goes on, so that what is issued next does not wait for them. A second
        thread sees them through, whether or not anybody waits for the result.
        """
        mine = buffer.clone()
        arrivals = [torch.empty_like(buffer) for _ in self._peers]
        finishing: list[Work] = []

        def post() -> None:
            finish = self._post(
                operation,
                sends=[(peer, mine) for peer in self._peers],
                receives=list(zip(self._peers, arrivals, strict=True)),
            )

            def add_up() -> None:
                finish()
                if buffer.numel():
                    self._sums.combine(arrivals, mine, buffer, op, average=average)

            described = f"{operation} (number {self._running} of communicator {self._group.number})"
            record = self._thread.hand_over()
            finishing.append(self._finisher().submit(described, add_up, record=record, bytes=buffer.nbytes))

        posting = self._queue(operation, post, buffer.nbytes)
        return HandedOverWork(posting, finishing)

    def _finisher(self) -> OperationThread:
        if self._second_thread is None:
            self._second_thread = self._make_thread("-small")
        return self._second_thread

    def _make_thread(self, suffix: str = "") -> OperationThread:
        return OperationThread(
            name=f"shardrt-gloo-{self._group.number}{suffix}",
            rank=self.rank,
            timeout=self._group.timeout,
            control=self._group.control,
            abort=lambda: self._messages.close_connections(self._peers[0]),
            timeline=self._group.timeline,
            flight=self._group.flight,
        )

    def _submit(self, operation: str, steps: Steps, nbytes: int) -> ThreadedWork:
        """See Note [Posted by the caller]."""
        failed: list[Exception] = []
        if self._last is None or self._last.succeeded:
            self._running = self._issued + 1
            try:
                with torch.inference_mode():  # as in the thread
                    next(steps, None)
            except Exception as error:
                failed.append(error)

        def rest() -> None:
            if failed:
                raise failed[0]
            for _ in steps:
                pass

        return self._queue(operation, rest, nbytes)

    def _queue(self, operation: str, run: Callable[[], None], nbytes: int) -> ThreadedWork:
        self._issued += 1
        number = self._issued

        def numbered() -> None:
            self._running = number
            run()

        described = f"{operation} (number {number} of communicator {self._group.number})"
        self._last = self._thread.submit(
            described, numbered, bytes=nbytes, communicator=self._group.number, number=number
        )
        return self._last

    def _reduce_runs(
        self,
        operation: str,
        runs: Sequence[Sequence[torch.Tensor]],
        result: torch.Tensor,
        op: ReduceOp,
        average: bool,
        *,
        in_output: bool = False,
    ) -> Steps:
        """``in_output``: the result shares no memory with the runs, on any rank."""
        # The first peer's run may arrive where the sum goes: two ranks then need no memory beside it.
        is_apart = bool(in_output and self._peers) and not in_float32(result.dtype, op)
        count = len(self._peers) - is_apart
        # Two sets of arrival buffers, each as large as its chunks: the next travels while this one is added up.
        chunk_bytes = max(_SMALL_BYTES, self._scratch_bytes // max(1, 2 * count))
        chunk = even_chunk(runs, chunk_bytes // result.element_size())
        chunks = [cut_into_chunks(run, chunk) for run in runs]
        sizes = [max((one.numel for one in chunks[self.rank][turn::2]), default=0) for turn in range(2)]
        kept = [self._arrival_buffers(result, turn, sizes[turn], count) for turn in range(2)]
        under_way: list[Callable[[], None]] = []
        for step in range(max(map(len, chunks), default=0)):
            turn = step % 2
            receives: list[Message] = []
            arrivals: list[torch.Tensor] = []
            own = result[:0]
            into = own
            if step < len(chunks[self.rank]):
                mine = chunks[self.rank][step]
                into = result[mine.start : mine.start + mine.numel]
                own = self._laid.of(mine, turn=turn, rank=self.rank)
                arrivals = [buffer[: mine.numel] for buffer in kept[turn]]
                if is_apart:
                    arrivals.insert(0, into)
                receives = list(zip(self._peers, arrivals, strict=True))
            sends = [
                (peer, self._laid.of(chunks[peer][step], turn=turn, rank=peer))
                for peer in self._peers
                if step < len(chunks[peer])
            ]
            finish = self._post(operation, sends=sends, receives=receives)
            under_way.append(self._then_combine(finish, arrivals, own, into, op, average))
            if step == 0:
                yield
            if len(under_way) == 2:
                under_way.pop(0)()
        for finish in under_way:
            finish()

    def _arrival_buffers(self, like: torch.Tensor, turn: int, needed: int, count: int) -> list[torch.Tensor]:
        buffers = self._arrivals.setdefault(like.dtype, [[], []])[turn]
        if not needed:
            return []
        if buffers and buffers[0].numel() < needed:
            buffers.clear()
        while len(buffers) < count:
            buffers.append(like.new_empty(max(needed, buffers[0].numel() if buffers else 0)))
        return buffers[:count]

    def _then_combine(
        self,
        finish: Callable[[], None],
        arrivals: Sequence[torch.Tensor],
        own: torch.Tensor,
        result: torch.Tensor,
        op: ReduceOp,
        average: bool,
    ) -> Callable[[], None]:
        def run() -> None:
            finish()
            if own.numel():
                self._sums.combine(arrivals, own, result, op, average=average)

        return run

    def _spread_runs(
        self, operation: str, runs: Sequence[torch.Tensor], elsewhere: torch.Tensor | None = None
    ) -> Steps:
        own = runs[self.rank] if elsewhere is None else elsewhere
        finish = self._post(
            operation,
            sends=[(peer, own) for peer in self._peers],
            receives=[(peer, runs[peer]) for peer in self._peers],
        )
        yield
        if elsewhere is not None:
            runs[self.rank].copy_(elsewhere)
        finish()

    def _broadcast(self, buffer: torch.Tensor, source: int) -> Steps:
        relative = (self.rank - source) % self.world_size
        is_first = True
        for distance in _doublings(self.world_size):
            if relative < distance and relative + distance < self.world_size:
                finish = self._post("broadcast", sends=[((self.rank + distance) % self.world_size, buffer)])
            elif distance <= relative < 2 * distance:
                finish = self._post("broadcast", receives=[((self.rank - distance) % self.world_size, buffer)])
            else:
                continue
            if is_first:
                is_first = False
                yield
            finish()

    def _post(
        self, operation: str, *, sends: Sequence[Message] = (), receives: Sequence[Message] = ()
    ) -> Callable[[], None]:
        finish = self._messages.post(operation, self._running, sends=sends, receives=receives)

        def finished() -> None:
            finish()
            self._thread.note_progress()

        return finished


def _doublings(limit: int) -> Iterator[int]:
    return itertools.takewhile(lambda distance: distance < limit, (2**power for power in itertools.count()))

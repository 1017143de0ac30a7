"""Collectives made of point-to-point messages: the ways that all kinds of messages share, and Gloo's own messages.

Note [Why not Gloo's own collectives]: its reduce-scatter is an all-reduce and a copy, and its exchanges run half duplex
(Note [Receives first]). Here each byte travels once, in both directions at once, and runs may be uneven without
padding. Messages with a tag of their own also keep clear of the numbering of Gloo's collectives: another thread may run
DDP on the same process group meanwhile.

Note [Posted ahead]: an operation is a generator that stops once, when its first messages are posted. Those are posted
while the operation before it is still under way: when that one ends, the next has begun to travel, and the wires do not
wait for a thread to wake up and add. Whoever comes first posts: the caller, so that bytes travel while the thread wakes
up, which takes as long as moving some hundred thousand of them, or the thread. Posting does not wait for anybody, and
happens in the order of the calls. What needs scratch to receive into is not posted ahead: it would need more of it. The
thread does the rest. What fails is raised by ``wait``, wherever it failed.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from shardrt.comm import Capabilities, Traffic
from shardrt.comm.checks import (
    check_all_to_all,
    check_flat,
    check_gather,
    check_pieces,
    check_reduction,
    check_runs,
    check_source,
)
from shardrt.comm.scratch import Lease, ScratchPool
from shardrt.comm.thread import OperationThread, ThreadedWork
from shardrt.errors import ConfigError
from shardrt.protocols import Group, ReduceOp, Work
from shardrt_gloo.chunks import cut_into_chunks, even_chunk, side_by_side
from shardrt_gloo.messages import Message, Messages, Posts
from shardrt_gloo.sums import Sums, in_float32

_SMALL_BYTES = 4096
"""Up to here a message costs its latency, and its size nothing."""
_AHEAD = 1
"""Operations whose messages are posted beside those of the one under way."""
Steps = Iterator[None]
"""What an operation does; see Note [Posted ahead]."""


@attrs.frozen
class Call:
    """An operation of this communicator, as errors and messages name it."""

    operation: str
    number: int


@attrs.define(eq=False)
class Posting:
    """An operation that goes through the thread: the how manieth, and what its first messages ran into."""

    place: int
    steps: Steps
    needs_scratch: bool = False
    whole: bool = True
    """Whether its first messages are all that it sends and receives."""
    failed: Exception | None = None


class GlooCommunicator:
    """See :class:`shardrt.protocols.Communicator`. ``chunk_mb`` bounds the memory that a reduction needs."""

    name = "gloo"
    capabilities = Capabilities(concurrent=True)

    def __init__(self, group: Group, *, chunk_mb: float = 8.0) -> None:
        check_chunk(chunk_mb)
        self.rank = group.rank
        self.world_size = group.world_size
        self.traffic = Traffic()
        self._group = group
        self._issued = 0
        self._peers = [rank for rank in range(group.world_size) if rank != group.rank]
        self._scratch_bytes = int(chunk_mb * 2**20)
        self._messages: Posts = Messages(group, self.traffic)
        self._small_messages: Posts = self._messages
        """Of small all-reduces, which keep no order with the others."""
        self._sums = Sums(group.rank)
        self._scratch = ScratchPool()
        self._queued = 0
        self._ended = 0
        self._unposted: deque[Posting] = deque()
        self._posting = threading.Lock()
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
        call = self._next("reduce_scatter")
        return self._submit(
            call,
            self._reduce_runs(call, runs, result, "sum", average, in_output=in_output),
            sum(piece.nbytes for run in runs for piece in run),
            needs_scratch=self._received_apart(result, "sum", in_output) > 0,
        )

    def all_gather(self, buffer: torch.Tensor, splits: Sequence[int]) -> ThreadedWork:
        """Copy each run from its owner to everyone."""
        check_runs("all_gather", buffer, splits, self.world_size, self.rank)
        runs = torch.split(buffer, list(splits))
        call = self._next("all_gather")
        return self._submit(call, self._spread_runs(call, runs), buffer.nbytes)

    def all_gather_from(self, own: torch.Tensor, runs: Sequence[torch.Tensor]) -> ThreadedWork:
        """Copy each run from its owner to everyone, this rank's from where it is."""
        check_gather("all_gather", own, runs, self.world_size, self.rank)
        call = self._next("all_gather")
        return self._submit(call, self._spread_runs(call, runs, own), sum(run.nbytes for run in runs))

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = "sum", average: bool = False) -> Work:
        """Reduce an even run on each rank, then gather the runs: the same bits everywhere."""
        check_flat("all_reduce", buffer, self.rank)
        check_reduction("all_reduce", buffer, op, average, self.rank)
        return self._all_reduce("all_reduce", buffer, op, average)

    def all_to_all(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> ThreadedWork:
        """Exchange pairwise."""
        check_all_to_all(received, sent, self.world_size, self.rank)
        call = self._next("all_to_all")

        def steps() -> Steps:
            finish = self._post(
                call,
                sends=[(peer, sent[peer]) for peer in self._peers],
                receives=[(peer, received[peer]) for peer in self._peers],
            )
            yield
            received[self.rank].copy_(sent[self.rank])
            finish()

        return self._submit(call, steps(), sum(piece.nbytes for piece in sent))

    def broadcast(self, buffer: torch.Tensor, source: int) -> ThreadedWork:
        """Down a binomial tree: each round doubles the ranks that have the data."""
        check_flat("broadcast", buffer, self.rank)
        check_source("broadcast", source, self.world_size, self.rank)
        call = self._next("broadcast")
        return self._submit(call, self._broadcast(call, buffer, source), buffer.nbytes, whole=False)

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
            return self._all_reduce_at_once(self._next(operation), buffer, op, average)
        share, rest = divmod(buffer.numel(), self.world_size)
        runs = torch.split(buffer, [share + (rank < rest) for rank in range(self.world_size)])

        call = self._next(operation)

        def steps() -> Steps:
            yield from self._reduce_runs(call, [[run] for run in runs], runs[self.rank], op, average)
            for _ in self._spread_runs(call, runs):
                pass

        return self._submit(call, steps(), buffer.nbytes, needs_scratch=True, whole=False)

    def _all_reduce_at_once(self, call: Call, buffer: torch.Tensor, op: ReduceOp, average: bool) -> ThreadedWork:
        """Everyone sends everything to everyone: one message time instead of two.

        The caller posts the messages, so that they wait for nothing that was issued before, and nothing waits for them.
        A second thread sees them through, whether or not anybody waits for the result.
        """
        mine = buffer.clone()
        arrivals = [torch.empty_like(buffer) for _ in self._peers]

        def steps() -> Steps:
            finish = self._small_messages.post(
                call.operation,
                call.number,
                sends=[(peer, mine) for peer in self._peers],
                receives=list(zip(self._peers, arrivals, strict=True)),
            )
            yield
            finish()
            self._thread.note_progress()
            if buffer.numel():
                self._sums.combine(arrivals, mine, buffer, op, average=average)

        posting = Posting(0, steps())
        _post_first(posting)
        return self._queue(self._finisher(), call, lambda: _finish(posting), buffer.nbytes)

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
            abort=self._give_up,
            timeline=self._group.timeline,
            flight=self._group.flight,
        )

    def _give_up(self) -> None:
        for messages in {id(one): one for one in (self._messages, self._small_messages)}.values():
            messages.close_connections(self._peers[0])

    def _next(self, operation: str) -> Call:
        self._thread.check_open(operation)
        self._issued += 1
        return Call(operation, self._issued)

    def _submit(
        self, call: Call, steps: Steps, nbytes: int, *, needs_scratch: bool = False, whole: bool = True
    ) -> ThreadedWork:
        """See Note [Posted ahead]."""
        posting = Posting(self._queued, steps, needs_scratch, whole)
        self._queued += 1
        self._unposted.append(posting)
        self._post_first_messages(self._ended)

        def rest() -> None:
            try:
                self._post_first_messages(posting.place)
                _finish(posting)
            finally:
                self._ended += 1

        return self._queue(self._thread, call, rest, nbytes)

    def _post_first_messages(self, place: int) -> None:
        """Of the operation whose turn it is, the one in this place, and of those that may go ahead."""
        with self._posting:
            while self._unposted:
                if not self._may_post(self._unposted[0], place):
                    return
                _post_first(self._unposted.popleft())

    def _may_post(self, posting: Posting, place: int) -> bool:
        return posting.place <= place + (0 if posting.needs_scratch else _AHEAD)

    def _queue(self, thread: OperationThread, call: Call, run: Callable[[], None], nbytes: int) -> ThreadedWork:
        described = f"{call.operation} (number {call.number} of communicator {self._group.number})"
        return thread.submit(described, run, bytes=nbytes, communicator=self._group.number, number=call.number)

    def _reduce_runs(
        self,
        call: Call,
        runs: Sequence[Sequence[torch.Tensor]],
        result: torch.Tensor,
        op: ReduceOp,
        average: bool,
        *,
        in_output: bool = False,
    ) -> Steps:
        """``in_output``: the result shares no memory with the runs, on any rank."""
        count = self._received_apart(result, op, in_output)
        # Two chunks at a time: the next one travels while this one is added up.
        chunk_bytes = max(_SMALL_BYTES, self._scratch_bytes // max(1, 2 * count))
        chunk = even_chunk(runs, chunk_bytes // result.element_size())
        chunks = [cut_into_chunks(run, chunk) for run in runs]
        under_way: list[Callable[[], None]] = []
        for step in range(max(map(len, chunks), default=0)):
            receives: list[Message] = []
            sends: list[Message] = []
            arrivals: list[torch.Tensor] = []
            leases: list[Lease] = []
            own = into = result[:0]
            for peer in self._peers:
                if step < len(chunks[peer]):
                    laid, leased = side_by_side(chunks[peer][step], self._scratch)
                    sends.append((peer, laid))
                    leases += leased
            if step < len(chunks[self.rank]):
                mine = chunks[self.rank][step]
                into = result[mine.start : mine.start + mine.numel]
                own, leased = side_by_side(mine, self._scratch)
                kept = [self._scratch.take(mine.numel, result.dtype, result.device) for _ in range(count)]
                leases += leased + kept
                arrivals = [into] * (len(self._peers) - count) + [lease.tensor for lease in kept]
                receives = list(zip(self._peers, arrivals, strict=True))
            finish = self._post(call, sends=sends, receives=receives)
            under_way.append(self._then_combine(finish, arrivals, own, into, op, average, leases))
            if step == 0:
                yield
            if len(under_way) == 2:
                under_way.pop(0)()
        for finish in under_way:
            finish()

    def _received_apart(self, result: torch.Tensor, op: ReduceOp, in_output: bool) -> int:
        """From how many peers a run is received into scratch. The first one's may arrive where the sum goes:
        two ranks then need no memory beside it."""
        is_apart = bool(in_output and self._peers) and not in_float32(result.dtype, op)
        return len(self._peers) - is_apart

    def _then_combine(
        self,
        finish: Callable[[], None],
        arrivals: Sequence[torch.Tensor],
        own: torch.Tensor,
        result: torch.Tensor,
        op: ReduceOp,
        average: bool,
        leases: Sequence[Lease],
    ) -> Callable[[], None]:
        def run() -> None:
            finish()
            if own.numel():
                self._sums.combine(arrivals, own, result, op, average=average)
            for lease in leases:
                lease.release()

        return run

    def _spread_runs(self, call: Call, runs: Sequence[torch.Tensor], elsewhere: torch.Tensor | None = None) -> Steps:
        own = runs[self.rank] if elsewhere is None else elsewhere
        finish = self._post(
            call,
            sends=[(peer, own) for peer in self._peers],
            receives=[(peer, runs[peer]) for peer in self._peers],
        )
        yield
        if own.data_ptr() != runs[self.rank].data_ptr():
            runs[self.rank].copy_(own)
        finish()

    def _broadcast(self, call: Call, buffer: torch.Tensor, source: int) -> Steps:
        relative = (self.rank - source) % self.world_size
        is_first = True
        for distance in _doublings(self.world_size):
            if relative < distance and relative + distance < self.world_size:
                finish = self._post(call, sends=[((self.rank + distance) % self.world_size, buffer)])
            elif distance <= relative < 2 * distance:
                finish = self._post(call, receives=[((self.rank - distance) % self.world_size, buffer)])
            else:
                continue
            if is_first:
                is_first = False
                yield
            finish()

    def _post(
        self, call: Call, *, sends: Sequence[Message] = (), receives: Sequence[Message] = ()
    ) -> Callable[[], None]:
        finish = self._messages.post(call.operation, call.number, sends=sends, receives=receives)

        def finished() -> None:
            finish()
            self._thread.note_progress()

        return finished


def check_chunk(chunk_mb: float) -> None:
    """Refuse a size that is none."""
    if not chunk_mb > 0:
        raise ConfigError(f"gloo option chunk_mb must be above 0, got {chunk_mb!r}")


def _post_first(posting: Posting) -> None:
    try:
        with torch.inference_mode():  # as in the thread
            next(posting.steps, None)
    except Exception as error:
        posting.failed = error


def _finish(posting: Posting) -> None:
    if posting.failed is not None:
        raise posting.failed
    for _ in posting.steps:
        pass


def _doublings(limit: int) -> Iterator[int]:
    return itertools.takewhile(lambda distance: distance < limit, (2**power for power in itertools.count()))

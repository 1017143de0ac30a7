"""The collectives over connections of their own: see Note [Streams].

Two lanes: operations go one behind the other on the first; small all-reduces, which wait for nothing that was issued
before, have the second. What an operation sends and expects is queued when it is issued, if all of it is known then:
so the wires go on while a thread wakes up or adds. Only where it depends on what comes (a broadcast hands on what it
gets, an all-reduce spreads what it has reduced) those behind it wait for its end, or ranks would disagree on the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from shardrt.comm import Traffic
from shardrt.comm.scratch import Lease, ScratchPool
from shardrt.protocols import Group, ReduceOp
from shardrt_gloo.chunks import Chunk, cut_into_chunks, side_by_side
from shardrt_gloo.communicator import Call, GlooCommunicator, Posting, Steps
from shardrt_gloo.connecting import Lane as Connections
from shardrt_gloo.lane import IncomingTensor, Lane, Part, bytes_of
from shardrt_gloo.messages import Message
from shardrt_gloo.sums import Sums

LANES = 2
_CACHED_BYTES = 512 * 1024
"""What is added as soon as it has come: small enough to be still in the processor's cache."""


class LaneMessages:
    """Messages over a lane; in place of :class:`shardrt_gloo.messages.Messages`."""

    def __init__(self, lane: Lane, traffic: Traffic) -> None:
        self.lane = lane
        self._traffic = traffic

    def post(
        self, operation: str, number: int, *, sends: Sequence[Message], receives: Sequence[Message]
    ) -> Callable[[], None]:
        """Queue messages; the returned call waits for them."""
        is_done = self.lane.queue(
            operation,
            number,
            sends=[(peer, tensor.dtype, tensor.nbytes, _whole(tensor)) for peer, tensor in sends],
            receives=[(peer, tensor.dtype, IncomingTensor(tensor)) for peer, tensor in receives if tensor.numel()],
        )
        self._traffic.count(
            operation,
            sent=sum(tensor.nbytes for _, tensor in sends),
            received=sum(tensor.nbytes for _, tensor in receives),
        )
        return lambda: self.lane.drive(operation, number, is_done)

    def close_connections(self, peer: int) -> None:
        """End waits that nobody wants any more."""
        del peer
        self.lane.abort()


def _whole(tensor: torch.Tensor) -> Iterator[Part]:
    yield tensor, _nothing


def _nothing() -> None:
    pass


class StreamsCommunicator(GlooCommunicator):
    """See :class:`shardrt.protocols.Communicator`."""

    def __init__(self, group: Group, lanes: Sequence[Connections], *, chunk_mb: float = 8.0) -> None:
        self._partial = -1
        """The last operation that was begun and not queued as a whole."""
        super().__init__(group, chunk_mb=chunk_mb)
        first, second = (
            LaneMessages(Lane(group, lane, progress=lambda: self._thread.note_progress()), self.traffic)
            for lane in lanes
        )
        self._messages = first
        self._small_messages = second
        self._lane = first.lane

    def close(self) -> None:
        """End the threads and hang up."""
        super().close()
        for messages in (self._messages, self._small_messages):
            assert isinstance(messages, LaneMessages)
            messages.lane.close()

    def _may_post(self, posting: Posting, place: int) -> bool:
        if posting.place > place and self._partial >= place:
            return False
        if not posting.whole:
            self._partial = posting.place
        return True

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
        scratch_chunk = max(1, self._scratch_bytes // result.element_size())
        reduction = _Reduction(
            self._sums,
            self._scratch,
            runs[self.rank],
            result,
            op,
            average,
            apart=self._received_apart(result, op, in_output),
            peers=self._peers,
            most=min(_CACHED_BYTES // result.element_size(), scratch_chunk // max(1, 2 * len(self._peers))),
        )
        sizes = {peer: sum(piece.nbytes for piece in runs[peer]) for peer in self._peers}
        is_done = self._lane.queue(
            call.operation,
            call.number,
            sends=[
                (peer, result.dtype, sizes[peer], _in_parts(cut_into_chunks(runs[peer], scratch_chunk), self._scratch))
                for peer in self._peers
            ],
            receives=[
                (peer, result.dtype, arriving) for peer, arriving in zip(self._peers, reduction.arriving, strict=True)
            ],
        )
        self.traffic.count(
            call.operation, sent=sum(sizes.values()), received=len(self._peers) * sum(p.nbytes for p in runs[self.rank])
        )
        yield
        reduction.begin()
        self._lane.drive(call.operation, call.number, is_done)
        reduction.end()


def _in_parts(chunks: Sequence[Chunk], pool: ScratchPool) -> Iterator[Part]:
    for chunk in chunks:
        laid, leases = side_by_side(chunk, pool)
        yield laid, leases[0].release if leases else _nothing


class _Reduction:
    """Adds up this rank's run, chunk by chunk, as soon as a chunk has come from all peers."""

    def __init__(
        self,
        sums: Sums,
        pool: ScratchPool,
        own: Sequence[torch.Tensor],
        result: torch.Tensor,
        op: ReduceOp,
        average: bool,
        *,
        apart: int,
        peers: Sequence[int],
        most: int,
    ) -> None:
        """``apart``: how many peers' parts arrive in scratch, and not where the sum goes."""
        self._sums = sums
        self._pool = pool
        self._result = result
        self._op = op
        self._average = average
        self.chunks = cut_into_chunks(own, max(1, most))
        self.combined = 0
        """Chunks that are."""
        self.begun = False
        direct = bytes_of(result) if apart < len(peers) and result.numel() else None
        self.arriving = [
            _Arriving(self, None if index >= len(peers) - apart else direct, result) for index in range(len(peers))
        ]

    def begin(self) -> None:
        """Its turn has come: scratch may be taken."""
        self.begun = True

    def room(self, numel: int) -> Lease:
        """For what comes from a peer."""
        return self._pool.take(numel, self._result.dtype, self._result.device)

    def combine(self) -> None:
        """What has come from all."""
        while self.combined < len(self.chunks) and all(one.whole > self.combined for one in self.arriving):
            chunk = self.chunks[self.combined]
            into = self._result[chunk.start : chunk.start + chunk.numel]
            own, leases = side_by_side(chunk, self._pool)
            arrived = [one.chunk(self.combined) for one in self.arriving]
            self._sums.combine([tensor for tensor, _ in arrived], own, into, self._op, average=self._average)
            for lease in (*leases, *(lease for _, lease in arrived if lease is not None)):
                lease.release()
            self.combined += 1

    def end(self) -> None:
        """All has come. Nothing that refers to itself is left, which would keep gradients until it is collected."""
        self.arriving.clear()


class _Arriving:
    """One peer's part of a reduction, at most two chunks ahead of what is added."""

    def __init__(self, reduction: _Reduction, direct: memoryview | None, result: torch.Tensor) -> None:
        """``direct``: the memory of the result, where it arrives there."""
        self.nbytes = result.nbytes
        self.whole = 0
        """Chunks that have come."""
        self._reduction = reduction
        self._direct = direct
        self._result = result
        self._leases: dict[int, tuple[Lease, memoryview]] = {}
        self._come = 0
        """Bytes of the current chunk."""

    def view(self) -> memoryview | None:
        """See :class:`shardrt_gloo.lane.Incoming`."""
        reduction = self._reduction
        chunk = reduction.chunks[self.whole]
        item = self._result.element_size()
        if self._direct is not None:
            return self._direct[chunk.start * item + self._come : (chunk.start + chunk.numel) * item]
        if self.whole not in self._leases:
            if not reduction.begun or self.whole >= reduction.combined + 2:
                return None
            lease = reduction.room(chunk.numel)
            self._leases[self.whole] = lease, bytes_of(lease.tensor)
        return self._leases[self.whole][1][self._come :]

    def take(self, count: int) -> None:
        """See :class:`shardrt_gloo.lane.Incoming`."""
        self.nbytes -= count
        self._come += count
        if self._come == self._reduction.chunks[self.whole].numel * self._result.element_size():
            self.whole += 1
            self._come = 0
            self._reduction.combine()

    def chunk(self, index: int) -> tuple[torch.Tensor, Lease | None]:
        """What has come of one, and the scratch it is in."""
        chunk = self._reduction.chunks[index]
        if self._direct is not None:
            return self._result[chunk.start : chunk.start + chunk.numel], None
        lease, _ = self._leases.pop(index)
        return lease.tensor, lease

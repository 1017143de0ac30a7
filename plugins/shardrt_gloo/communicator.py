"""Collectives made of point-to-point messages.

Note [Why not Gloo's own collectives]: its reduce-scatter is an all-reduce and a copy, and a large exchange in which
both sides post the send first runs half duplex, because the note "ready to receive" queues behind the data. Here every
rank posts all receives before any send, each byte travels once, and runs may be uneven without padding. Messages with
a tag of their own also keep clear of the numbering of Gloo's collectives: another thread may run DDP on the same
process group meanwhile.

Note [Rank order]: sums are formed in rank order, 0 + 1 + 2 ..., whoever owns the run. So the result does not depend
on the partition, and with two ranks it has the bits of any other order. Half-precision runs are summed in float32 and
rounded once.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardrt.comm import Capabilities, Traffic
from shardrt.comm.checks import check_all_to_all, check_flat, check_reduction, check_runs, check_source
from shardrt.comm.thread import OperationThread, ThreadedWork
from shardrt.comm.works import FollowedWork
from shardrt.errors import CommunicationError, ConfigError
from shardrt.protocols import Group, ReduceOp, Work

_HALF = (torch.float16, torch.bfloat16)
_SMALL_BYTES = 4096
"""Up to here a message costs its latency, and its size nothing."""
_JOINS: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
Message = tuple[int, torch.Tensor]
"""A peer's rank and what to send to it or where to receive from it."""


class GlooCommunicator:
    """See :class:`shardrt.protocols.Communicator`. ``chunk_mb`` bounds the memory that a reduction needs."""

    name = "gloo"
    capabilities = Capabilities(concurrent=True)

    def __init__(self, group: Group, *, chunk_mb: float = 4.0) -> None:
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
        self._sums: dict[torch.dtype, torch.Tensor] = {}
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
        return self._submit(
            "reduce_scatter",
            lambda: self._reduce_runs("reduce_scatter", runs, result, "sum", average, in_output=output is not None),
            buffer.nbytes,
        )

    def all_gather(self, buffer: torch.Tensor, splits: Sequence[int]) -> ThreadedWork:
        """Copy each run from its owner to everyone."""
        check_runs("all_gather", buffer, splits, self.world_size, self.rank)
        runs = torch.split(buffer, list(splits))
        return self._submit("all_gather", lambda: self._spread_runs("all_gather", runs), buffer.nbytes)

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = "sum", average: bool = False) -> Work:
        """Reduce an even run on each rank, then gather the runs: the same bits everywhere."""
        check_flat("all_reduce", buffer, self.rank)
        check_reduction("all_reduce", buffer, op, average, self.rank)
        return self._all_reduce("all_reduce", buffer, op, average)

    def all_to_all(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> ThreadedWork:
        """Exchange pairwise."""
        check_all_to_all(received, sent, self.world_size, self.rank)

        def run() -> None:
            received[self.rank].copy_(sent[self.rank])
            self._exchange(
                "all_to_all",
                sends=[(peer, sent[peer]) for peer in self._peers],
                receives=[(peer, received[peer]) for peer in self._peers],
            )

        return self._submit("all_to_all", run, sum(piece.nbytes for piece in sent))

    def broadcast(self, buffer: torch.Tensor, source: int) -> ThreadedWork:
        """Down a binomial tree: each round doubles the ranks that have the data."""
        check_flat("broadcast", buffer, self.rank)
        check_source("broadcast", source, self.world_size, self.rank)
        return self._submit("broadcast", lambda: self._broadcast(buffer, source), buffer.nbytes)

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
        if buffer.nbytes <= _SMALL_BYTES and buffer.dtype not in _HALF:
            return self._all_reduce_at_once(operation, buffer, op, average)
        share, rest = divmod(buffer.numel(), self.world_size)
        runs = torch.split(buffer, [share + (rank < rest) for rank in range(self.world_size)])

        def run() -> None:
            self._reduce_runs(operation, runs, runs[self.rank], op, average)
            self._spread_runs(operation, runs)

        return self._submit(operation, run, buffer.nbytes)

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
                    self._combine(arrivals, mine, buffer, op, average)

            described = f"{operation} (number {self._running} of communicator {self._group.number})"
            record = self._thread.hand_over()
            finishing.append(self._finisher().submit(described, add_up, record=record, bytes=buffer.nbytes))

        posting = self._submit(operation, post, buffer.nbytes)
        return FollowedWork([posting], then=lambda: finishing[0].wait())

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
            abort=self._close_connections,
            timeline=self._group.timeline,
            flight=self._group.flight,
        )

    def _submit(self, operation: str, run: Callable[[], None], nbytes: int) -> ThreadedWork:
        self._issued += 1
        number = self._issued

        def numbered() -> None:
            self._running = number
            run()

        described = f"{operation} (number {number} of communicator {self._group.number})"
        return self._thread.submit(described, numbered, bytes=nbytes, communicator=self._group.number, number=number)

    def _reduce_runs(
        self,
        operation: str,
        runs: Sequence[torch.Tensor],
        result: torch.Tensor,
        op: ReduceOp,
        average: bool,
        *,
        in_output: bool = False,
    ) -> None:
        """``in_output``: the result shares no memory with the runs, on any rank."""
        own = runs[self.rank]
        # The first peer's run may arrive where the sum goes: two ranks then need no memory beside it.
        is_apart = bool(in_output and self._peers) and not (result.dtype in _HALF and op == "sum")
        count = len(self._peers) - is_apart
        # Two sets of arrival buffers: the next chunk travels while this one is added up.
        chunk_bytes = max(_SMALL_BYTES, self._scratch_bytes // max(1, 2 * count))
        chunk = chunk_bytes // result.element_size()
        steps = -(-max((run.numel() for run in runs), default=0) // chunk)
        kept = self._arrival_buffers(own, chunk, count)
        under_way: list[Callable[[], None]] = []
        for step in range(steps):
            part = slice(step * chunk, (step + 1) * chunk)
            arrivals = [buffer[: own[part].numel()] for buffer in kept[step % 2]]
            if is_apart:
                arrivals.insert(0, result[part])
            finish = self._post(
                operation,
                sends=[(peer, runs[peer][part]) for peer in self._peers],
                receives=list(zip(self._peers, arrivals, strict=True)),
            )
            under_way.append(self._then_combine(finish, arrivals, own[part], result[part], op, average))
            if len(under_way) == 2:
                under_way.pop(0)()
        for finish in under_way:
            finish()

    def _arrival_buffers(self, like: torch.Tensor, chunk: int, count: int) -> list[list[torch.Tensor]]:
        needed = min(chunk, like.numel())
        kept = self._arrivals.setdefault(like.dtype, [[], []])
        for buffers in kept:
            if buffers and buffers[0].numel() < needed:
                buffers.clear()
            while len(buffers) < count:
                buffers.append(like.new_empty(max(needed, buffers[0].numel() if buffers else 0)))
        return [buffers[:count] for buffers in kept]

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
                self._combine(arrivals, own, result, op, average)

        return run

    def _combine(
        self, arrivals: Sequence[torch.Tensor], own: torch.Tensor, result: torch.Tensor, op: ReduceOp, average: bool
    ) -> None:
        in_rank_order = [*arrivals[: self.rank], own, *arrivals[self.rank :]]
        total = self._float32_sum(result) if result.dtype in _HALF and op == "sum" else result
        if len(in_rank_order) == 1:
            total.copy_(own)
        elif total.dtype == result.dtype:
            join = _JOINS[op]
            # The own run may be the result itself: it must be read before, or in the moment in which, it is written.
            first = arrivals[0] if self.rank > 1 else total
            join(in_rank_order[0], in_rank_order[1], out=first)
            for index, addend in enumerate(in_rank_order[2:], start=2):
                into = total if index >= self.rank else first
                join(first, addend, out=into)
                first = into
        else:
            total.copy_(in_rank_order[0])
            for addend in in_rank_order[1:]:
                total.add_(addend)
        if average:
            exact = total.is_floating_point() or total.is_complex()
            total.div_(self.world_size, rounding_mode=None if exact else "floor")
        if total is not result:
            result.copy_(total)

    def _float32_sum(self, like: torch.Tensor) -> torch.Tensor:
        kept = self._sums.get(like.dtype)
        if kept is None or kept.numel() < like.numel():
            kept = self._sums[like.dtype] = torch.empty(like.numel(), dtype=torch.float32, device=like.device)
        return kept[: like.numel()]

    def _spread_runs(self, operation: str, runs: Sequence[torch.Tensor]) -> None:
        self._exchange(
            operation,
            sends=[(peer, runs[self.rank]) for peer in self._peers],
            receives=[(peer, runs[peer]) for peer in self._peers],
        )

    def _broadcast(self, buffer: torch.Tensor, source: int) -> None:
        relative = (self.rank - source) % self.world_size
        for distance in _doublings(self.world_size):
            if relative < distance and relative + distance < self.world_size:
                self._exchange("broadcast", sends=[((self.rank + distance) % self.world_size, buffer)], receives=[])
            elif distance <= relative < 2 * distance:
                self._exchange("broadcast", sends=[], receives=[((self.rank - distance) % self.world_size, buffer)])

    def _exchange(self, operation: str, *, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self._post(operation, sends=sends, receives=receives)()

    def _post(self, operation: str, *, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Start all messages, receives first; the returned call waits for them."""
        pg = self._group.process_group
        posted: list[tuple[int, str, Any]] = []
        sent = received = 0
        for peer, tensor in receives:
            if tensor.numel():
                with self._naming(operation, self._running, "from", peer):
                    work = dist.irecv(tensor, group=pg, group_src=peer, tag=self._tag(operation, tensor))
                posted.append((peer, "from", work))
                received += tensor.nbytes
        for peer, tensor in sends:
            if tensor.numel():
                with self._naming(operation, self._running, "to", peer):
                    work = dist.isend(tensor, group=pg, group_dst=peer, tag=self._tag(operation, tensor))
                posted.append((peer, "to", work))
                sent += tensor.nbytes
        self.traffic.count(operation, sent=sent, received=received)
        number = self._running
        return lambda: self._finish(operation, number, posted)

    def _finish(self, operation: str, number: int, posted: Sequence[tuple[int, str, Any]]) -> None:
        deadline = time.monotonic() + self._group.timeout
        for peer, direction, work in posted:
            with self._naming(operation, number, direction, peer):
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        self._thread.note_progress()

    @contextmanager
    def _naming(self, operation: str, number: int, direction: str, peer: int) -> Iterator[None]:
        """Gloo's errors say neither what was going on nor with whom."""
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            took = time.monotonic() - started
            what = (
                f"took longer than {self._group.timeout:g} s; rank {peer} is stuck, or makes other calls than this rank"
                if took > 0.9 * self._group.timeout
                else f"failed after {took:.1f} s: {str(error).splitlines()[0]}; see why rank {peer} ended"
            )
            failure = CommunicationError(
                f"rank {self.rank}: {operation} (number {number} of communicator {self._group.number}) "
                f"{direction} rank {peer} {what}, or raise Runtime(timeout=...)"
            )
            failure.ranks = (peer,)
            raise failure from error

    def _tag(self, operation: str, tensor: torch.Tensor) -> int:
        """Only messages of the same operation, of the same number and size, ever meet.

        Ranks that make different calls then end in a timeout, and never in one another's data.
        """
        words = f"{self._group.number}/{self._running}/{operation}/{tensor.dtype}/{tensor.numel()}"
        return zlib.crc32(words.encode()) & 0x7FFF_FFFF

    def _close_connections(self) -> None:
        """End waits that nobody wants any more: Gloo closes a group's connections when a wait of it times out."""
        with suppress(RuntimeError):
            never = dist.irecv(torch.zeros(1), group=self._group.process_group, group_src=self._peers[0], tag=0)
            assert never is not None
            never.wait(timedelta(milliseconds=1))


def _doublings(limit: int) -> Iterator[int]:
    return itertools.takewhile(lambda distance: distance < limit, (2**power for power in itertools.count()))

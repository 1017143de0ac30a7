"""Collectives in memory that the ranks of one host share.

Note [Two ways]: a tensor that lies in shared memory (from ``allocate``) is read by the peers where it is: each byte is
read once, and nothing is copied first. Anything else goes through slots, a chunk at a time, small enough to stay in the
cache between its writer and its readers; writing the next chunk overlaps with reading this one. Each rank goes its
own way: the notes in their areas tell which.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

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
from shardrt.comm.thread import OperationThread, ThreadedWork
from shardrt.errors import ConfigError
from shardrt.log import rank_logger
from shardrt.protocols import Group, ReduceOp, RunView
from shardrt_shm.arena import process_arena
from shardrt_shm.joining import join_areas, part
from shardrt_shm.pieces import Pieces
from shardrt_shm.room import why_no_room
from shardrt_shm.transfers import Exchange, Transfers, is_small
from shardrt_shm.viewing import view_runs

_SMALLEST_SHARED = 64 * 2**10
"""Below this a buffer is not worth a range of its own: it goes through one slot."""
_kept_after_failures: list[Any] = []
"""Buffers that peers may still be reading when an operation has failed here: never given back."""


class ShmCommunicator:
    """See :class:`shardrt.protocols.Communicator`. ``chunk_mb`` is the size of one slot; there are four per rank."""

    name = "shm"
    capabilities = Capabilities(concurrent=True)

    def __init__(self, group: Group, *, chunk_mb: float = 0.5) -> None:
        if not 0 < chunk_mb <= 1024:
            raise ConfigError(f"shm option chunk_mb must be above 0 and at most 1024, got {chunk_mb!r}")
        self.rank = group.rank
        self.world_size = group.world_size
        self.traffic = Traffic()
        self._group = group
        self._issued = self._ended = 0
        self._issuing = threading.Lock()
        self._closed = False
        self._log = rank_logger(group.rank, group.world_size)
        self._joined = join_areas(group, chunk_mb=chunk_mb, progress=lambda: self._thread.note_progress())
        self._transfers = Transfers(self._joined, rank=group.rank, world_size=group.world_size)
        self._thread = OperationThread(
            name=f"shardrt-shm-{group.number}",
            rank=self.rank,
            timeout=group.timeout,
            control=group.control,
            abort=self._abort,
            timeline=group.timeline,
            flight=group.flight,
        )

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory that peers read where it is; None where it is too small to matter, or where there is no room."""
        nbytes = numel * dtype.itemsize
        if nbytes < _SMALLEST_SHARED:
            return None
        reason = why_no_room(nbytes)
        if not reason:
            try:
                with torch.inference_mode(False):
                    return process_arena().take(nbytes).view(dtype)
            except OSError as error:
                reason = str(error)
        self._log.info("shm.no_room", bytes=nbytes, reason=reason)
        return None

    def view_runs(self, asked: Sequence[tuple[torch.Tensor, Sequence[int]]]) -> list[RunView | None]:
        """The runs of all ranks where they are. See :mod:`shardrt_shm.viewing`."""
        if not asked:
            return []

        def gather(table: torch.Tensor) -> None:
            self.all_gather(table.view(-1), [table[0].numel()] * self.world_size).wait()

        def agree(found: torch.Tensor) -> None:
            self.all_reduce(found, op="min").wait()

        return list(view_runs(asked, self.rank, self._joined.peers, gather, agree))

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
        start = sum(splits[: self.rank])
        result = buffer[start : start + splits[self.rank]] if output is None else output
        return self._reduce_scatter([buffer], list(splits), result, average)

    def reduce_scatter_pieces(
        self, pieces: Sequence[torch.Tensor], splits: Sequence[int], *, output: torch.Tensor, average: bool = False
    ) -> ThreadedWork:
        """Sum or average each run, read from the pieces it is in."""
        runs = check_pieces("reduce_scatter", pieces, splits, self.world_size, self.rank, output=output)
        check_reduction("reduce_scatter", output, "sum", average, self.rank)
        return self._reduce_scatter([piece for run in runs for piece in run], list(splits), output, average)

    def _reduce_scatter(
        self, tensors: Sequence[torch.Tensor], splits: list[int], result: torch.Tensor, average: bool
    ) -> ThreadedWork:
        pieces = Pieces(tensors)
        item, own = result.element_size(), splits[self.rank]
        return self._submit(
            "reduce_scatter",
            _signature(pieces.numel, result.dtype, splits),
            lambda words: [self._transfers.reduce(words, pieces, splits, result, "sum", average=average)],
            pieces.numel * item,
            ((pieces.numel - own) * item, own * (self.world_size - 1) * item),
        )

    def all_gather(self, buffer: torch.Tensor, splits: Sequence[int]) -> ThreadedWork:
        """Copy each run from its owner to everyone."""
        check_runs("all_gather", buffer, splits, self.world_size, self.rank)
        runs = torch.split(buffer, list(splits))
        return self._all_gather(runs[self.rank], runs)

    def all_gather_from(self, own: torch.Tensor, runs: Sequence[torch.Tensor]) -> ThreadedWork:
        """Copy each run from its owner to everyone, this rank's from where it is."""
        check_gather("all_gather", own, runs, self.world_size, self.rank)
        return self._all_gather(own, runs)

    def _all_gather(self, own: torch.Tensor, runs: Sequence[torch.Tensor]) -> ThreadedWork:
        sizes = [run.numel() for run in runs]
        nbytes = sum(sizes) * own.element_size()
        return self._submit(
            "all_gather",
            _signature(sum(sizes), own.dtype, sizes),
            lambda words: [self._transfers.spread(words, runs, own)],
            nbytes,
            (own.nbytes * (self.world_size - 1), nbytes - own.nbytes),
        )

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = "sum", average: bool = False) -> ThreadedWork:
        """Small buffers: everybody reads all. Others: an even run on each rank, then the runs of all."""
        check_flat("all_reduce", buffer, self.rank)
        check_reduction("all_reduce", buffer, op, average, self.rank)
        share, rest = divmod(buffer.numel(), self.world_size)
        sizes = [share + (rank < rest) for rank in range(self.world_size)]
        others = self.world_size - 1
        if is_small(buffer):
            moved = (buffer.nbytes * others, buffer.nbytes * others)
        else:
            own = sizes[self.rank] * buffer.element_size()
            moved = (buffer.nbytes - own + own * others, own * others + buffer.nbytes - own)
        return self._submit(
            "all_reduce",
            f"{_signature(buffer.numel(), buffer.dtype)}, {op}",
            lambda words: self._transfers.all_reduce(words, buffer, sizes, op, average=average),
            buffer.nbytes,
            moved,
        )

    def all_to_all(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> ThreadedWork:
        """Exchange pairwise."""
        check_all_to_all(received, sent, self.world_size, self.rank)
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        return self._submit(
            "all_to_all",
            str(sent[0].dtype),
            lambda words: [self._transfers.all_to_all(words, received, sent)],
            sum(piece.nbytes for piece in sent),
            (sum(sent[peer].nbytes for peer in peers), sum(received[peer].nbytes for peer in peers)),
        )

    def broadcast(self, buffer: torch.Tensor, source: int) -> ThreadedWork:
        """Everybody reads the source's."""
        check_flat("broadcast", buffer, self.rank)
        check_source("broadcast", source, self.world_size, self.rank)
        is_source = source == self.rank
        return self._submit(
            "broadcast",
            f"{_signature(buffer.numel(), buffer.dtype)}, source {source}",
            lambda words: [self._transfers.broadcast(words, buffer, source)],
            buffer.nbytes,
            (buffer.nbytes * (self.world_size - 1) if is_source else 0, 0 if is_source else buffer.nbytes),
        )

    def barrier(self) -> None:
        """A step without data."""
        self._submit("barrier", "", lambda words: [self._transfers.meet(words)], 0, (0, 0)).wait()

    def exchange(self, topic: str, value: Any) -> list[Any]:
        """Small JSON values, over the control channel."""
        return self._group.control.exchange(topic, value)

    def close(self) -> None:
        """End the thread and give the memory back; tensors from ``allocate`` stay good as long as they are held."""
        self._thread.close()
        if not self._closed:
            self._closed = True
            part(self._joined)
            # An operation that is still under way, given up, holds what it works on.
            del self._transfers, self._joined

    def _submit(
        self,
        operation: str,
        signature: str,
        plan: Callable[[str], list[Exchange]],
        nbytes: int,
        moved: tuple[int, int],
    ) -> ThreadedWork:
        with self._issuing:
            is_idle = self._issued == self._ended
            self._issued += 1
            number = self._issued
            described = f"{operation} (number {number} of communicator {self._group.number})"
            self._thread.check_open(described)
            exchanges = plan(f"{operation} {signature}".rstrip())
            if is_idle:
                with torch.inference_mode():  # as on the thread: these may be tensors of any kind
                    self._transfers.begin(exchanges[0])

            def attempt() -> None:
                self._joined.steps.operation = described
                try:
                    for exchange in exchanges:
                        self._transfers.run(exchange)
                except BaseException:
                    _kept_after_failures.append(exchanges)
                    raise
                self.traffic.count(operation, sent=moved[0], received=moved[1])
                self._ended = number

            return self._thread.submit(described, attempt, bytes=nbytes, communicator=self._group.number, number=number)

    def _abort(self) -> None:
        self._joined.steps.aborted = True


def _signature(numel: int, dtype: torch.dtype, splits: Sequence[int] | None = None) -> str:
    """What peers must have alike. Runs may be thousands of numbers: a checksum tells them apart as well."""
    runs = "" if splits is None else f" in runs {zlib.crc32(repr(list(splits)).encode()):08x}"
    return f"of {numel} {str(dtype).removeprefix('torch.')}{runs}"

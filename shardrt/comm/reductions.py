"""Checked ways to reduce with a backend that lacks an operation, a dtype, averages, uneven runs or a world size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import torch

from shardrt.comm.carriers import as_carrier, as_elements, put, take
from shardrt.comm.moves import Gather, Route, is_even
from shardrt.comm.works import FinishedWork, FollowedWork

if TYPE_CHECKING:
    from torch import Tensor

    from shardrt.comm.scratch import Lease
    from shardrt.protocols import ReduceOp, Work


@attrs.frozen(kw_only=True, eq=False)
class ReduceRoute(Route):
    """A route whose backend may or may not average by itself."""

    averages: bool

    def own_run(self, buffer: Tensor, splits: Sequence[int]) -> Tensor:
        """This rank's run."""
        rank = self.inner.rank
        return buffer.narrow(0, sum(splits[:rank]), splits[rank])


class ScatterNatively(ReduceRoute):
    """reduce_scatter with the backend's own, padded and averaged afterwards where need be."""

    def start(self, buffer: Tensor, splits: Sequence[int], *, output: Tensor | None, average: bool) -> Work:
        """Afterwards the output, or else the own run, holds the sum or average."""
        world_size = self.inner.world_size
        divides = average and not self.averages
        averages = average and not divides
        if self.uneven or is_even(splits):
            work = self._start_in_place(buffer, splits, output, averages)
            if not divides:
                return work
            result = self.own_run(buffer, splits) if output is None else output
            return FollowedWork([work], then=lambda: _divide(result, world_size))
        runs = as_carrier(buffer, self.carrier).split_with_sizes(self._parts(splits))
        longest = max(run.numel() for run in runs)
        lease = self.scratch(longest * world_size, buffer)
        cells = lease.tensor.split_with_sizes([longest] * world_size)
        for cell, run in zip(cells, runs, strict=True):
            put(cell, run)
        work = self.inner.reduce_scatter(lease.tensor, [longest] * world_size, average=averages)
        result = self.own_run(buffer, splits) if output is None else output

        def unpad() -> None:
            take(cells[self.inner.rank], result)
            if divides:
                _divide(result, world_size)

        return FollowedWork([work], then=unpad, leases=[lease])

    def _start_in_place(self, buffer: Tensor, splits: Sequence[int], output: Tensor | None, average: bool) -> Work:
        if self.native:
            return self.inner.reduce_scatter(buffer, splits, output=output, average=average)
        result = None if output is None else as_carrier(output, self.carrier)
        parts = self._parts(splits)
        return self.inner.reduce_scatter(as_carrier(buffer, self.carrier), parts, output=result, average=average)

    def _parts(self, splits: Sequence[int]) -> list[int]:
        """Complex numbers have two parts, everything else is one."""
        parts = self.dtype.itemsize // self.carrier.itemsize
        return [numel * parts for numel in splits]


class ScatterByExchange(Route):
    """reduce_scatter as an all_to_all of the runs, which their owners add in rank order."""

    def start(
        self,
        buffer: Tensor,
        splits: Sequence[int],
        *,
        output: Tensor | None,
        average: bool,
        op: ReduceOp = "sum",
    ) -> Work:
        """Afterwards the output, or else the own run, holds the sum or average, or an all_reduce's maximum."""
        if not any(splits):
            return FinishedWork()
        rank, world_size = self.inner.rank, self.inner.world_size
        runs = buffer.split_with_sizes(list(splits))
        words = self.words(splits)
        leases: list[Lease] = []
        sent: list[Tensor]
        if self.must_stage(splits):
            leases.append(self.scratch(sum(words), buffer))
            sent = list(leases[0].tensor.split_with_sizes(words))
            for peer, (cell, run) in enumerate(zip(sent, runs, strict=True)):
                if peer != rank:
                    put(cell, run)
        else:
            sent = [as_carrier(run, self.carrier) for run in runs]
        leases.append(self.scratch(words[rank] * world_size, buffer))
        received = list(leases[-1].tensor.split_with_sizes([words[rank]] * world_size))
        own = runs[rank]
        pieces = [as_elements(cell, self.dtype, own.numel()) for cell in received]
        pieces[rank] = own
        if self.uneven:
            # The own run is in its place already: nothing travels from here to here.
            sent[rank] = received[rank] = sent[rank].narrow(0, 0, 0)
        work = self.inner.all_to_all(received, sent)

        def add() -> None:
            _fold(pieces, op, result=own if output is None else output)
            if average:
                _divide(own if output is None else output, world_size)

        return FollowedWork([work], then=add, leases=leases)


class ScatterByAllReduce(ReduceRoute):
    """reduce_scatter as an all_reduce of the whole buffer, of which only the own run is kept."""

    def start(self, buffer: Tensor, splits: Sequence[int], *, output: Tensor | None, average: bool) -> Work:
        """Afterwards the output, or else the own run, holds the sum or average."""
        world_size = self.inner.world_size
        divides = average and not self.averages
        leases: list[Lease] = []
        flat = buffer
        if output is not None:
            # With an output the buffer must stay as it is, and an all_reduce is in place.
            leases.append(self.pool.take(buffer.numel(), self.dtype, buffer.device))
            flat = leases[0].tensor
            flat.copy_(buffer)
        own = self.own_run(flat, splits)
        work = self.inner.all_reduce(as_carrier(flat, self.carrier), average=average and not divides)
        if output is None and not divides:
            return work

        def keep_own() -> None:
            result = own
            if output is not None:
                result = output.copy_(own)
            if divides:
                _divide(result, world_size)

        return FollowedWork([work], then=keep_own, leases=leases)


class AllReduceNatively(ReduceRoute):
    """all_reduce with the backend's own, averaged afterwards where need be."""

    def start(self, buffer: Tensor, *, op: ReduceOp, average: bool) -> Work:
        """Afterwards the whole buffer holds the reduction, the same bits everywhere."""
        divides = average and not self.averages
        work = self.inner.all_reduce(as_carrier(buffer, self.carrier), op=op, average=average and not divides)
        if not divides:
            return work
        world_size = self.inner.world_size
        return FollowedWork([work], then=lambda: _divide(buffer, world_size))


@attrs.frozen(kw_only=True, eq=False)
class AllReduceByExchange:
    """all_reduce as two steps: owners reduce even runs by exchange, then everyone gathers them.

    The first step is waited for at the call. Were it left to ``wait``, ranks that wait in different orders would issue
    the second in different orders.
    """

    scatter: ScatterByExchange
    gather: Gather

    def start(self, buffer: Tensor, *, op: ReduceOp, average: bool) -> Work:
        """Afterwards the whole buffer holds the reduction, the same bits everywhere."""
        world_size = self.scatter.inner.world_size
        each, more = divmod(buffer.numel(), world_size)
        splits = [each + (rank < more) for rank in range(world_size)]
        self.scatter.start(buffer, splits, output=None, average=average, op=op).wait()
        return self.gather.start(buffer, splits)


def _divide(total: Tensor, by: int) -> None:
    if by > 1:
        total.div_(by)


def _fold(pieces: Sequence[Tensor], op: ReduceOp, *, result: Tensor) -> None:
    """Reduce the pieces in rank order, whichever rank does it. Pieces may be overwritten, except into a new result."""
    own = any(piece is result for piece in pieces)
    total = pieces[0] if own else result.copy_(pieces[0])
    for piece in pieces[1:]:
        if op == "sum":
            total.add_(piece)
        elif op == "max":
            torch.maximum(total, piece, out=total)
        else:
            torch.minimum(total, piece, out=total)
    if total is not result:
        result.copy_(total)

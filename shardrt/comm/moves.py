"""Checked ways to move data with a backend that lacks an operation, a dtype, uneven runs or a world size.

Each class is one route for one dtype, chosen when the runtime is built, so that a step only follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import attrs
import torch

from shardrt.comm.carriers import as_carrier, is_wider, put, take, words_for
from shardrt.comm.works import FinishedWork, FollowedWork

if TYPE_CHECKING:
    from torch import Tensor

    from shardrt.comm.scratch import Lease, ScratchPool
    from shardrt.protocols import Communicator, Work


def is_even(splits: Sequence[int]) -> bool:
    """Whether every run has the same size.

    Example:
        >>> from shardrt.comm.moves import is_even
        >>> is_even([2, 2, 2]), is_even([2, 0])
        (True, False)
    """
    return min(splits) == max(splits)


@attrs.frozen(kw_only=True, eq=False)
class Route:
    """What every route has: the backend, scratch, and what the data travels as."""

    inner: Communicator
    pool: ScratchPool
    dtype: torch.dtype
    carrier: torch.dtype
    uneven: bool
    """Whether the operation underneath takes runs of different sizes."""

    @property
    def native(self) -> bool:
        """Whether the backend takes the dtype itself."""
        return self.carrier == self.dtype

    @property
    def stages(self) -> bool:
        """Whether runs can only travel through scratch; see Note [Bit patterns]."""
        return is_wider(self.carrier, self.dtype)

    def scratch(self, words: int, like: Tensor) -> Lease:
        """Room for this many words."""
        return self.pool.take(words, self.carrier, like.device)

    def words(self, splits: Sequence[int]) -> list[int]:
        """The words of each run as it travels: padded to the longest where the backend wants them even."""
        words = [words_for(numel, self.dtype, self.carrier) for numel in splits]
        return words if self.uneven else [max(words)] * len(words)

    def must_stage(self, splits: Sequence[int]) -> bool:
        """Whether these runs cannot travel from where they are."""
        return self.stages or not (self.uneven or is_even(splits))


class GatherNatively(Route):
    """all_gather with the backend's own, padded and as bit patterns where need be."""

    def start(self, buffer: Tensor, splits: Sequence[int]) -> Work:
        """Afterwards every run holds what its owner had in it."""
        if self.native and (self.uneven or is_even(splits)):
            return self.inner.all_gather(buffer, splits)
        if not any(splits):
            return FinishedWork()
        words = self.words(splits)
        if not self.must_stage(splits):
            return self.inner.all_gather(as_carrier(buffer, self.carrier), words)
        rank = self.inner.rank
        lease = self.scratch(sum(words), buffer)
        cells, runs = lease.tensor.split_with_sizes(words), buffer.split_with_sizes(list(splits))
        put(cells[rank], runs[rank])
        work = self.inner.all_gather(lease.tensor, words)
        return FollowedWork([work], then=partial(_unpack, cells, runs, rank), leases=[lease])


class GatherByBroadcasts(Route):
    """all_gather as one broadcast per owner."""

    def start(self, buffer: Tensor, splits: Sequence[int]) -> Work:
        """Afterwards every run holds what its owner had in it."""
        rank = self.inner.rank
        runs = buffer.split_with_sizes(list(splits))
        leases: list[Lease] = []
        cells: Sequence[Tensor]
        if self.stages:
            words = [words_for(numel, self.dtype, self.carrier) for numel in splits]
            leases = [self.scratch(sum(words), buffer)]
            cells = leases[0].tensor.split_with_sizes(words)
            put(cells[rank], runs[rank])
        else:
            cells = [as_carrier(run, self.carrier) for run in runs]
        works = [self.inner.broadcast(cell, owner) for owner, cell in enumerate(cells) if cell.numel()]
        return FollowedWork(works, then=partial(_unpack, cells, runs, rank) if self.stages else None, leases=leases)


class GatherByExchange(Route):
    """all_gather as an all_to_all in which everyone sends its own run to everyone."""

    def start(self, buffer: Tensor, splits: Sequence[int]) -> Work:
        """Afterwards every run holds what its owner had in it."""
        if not any(splits):
            return FinishedWork()
        rank, world_size = self.inner.rank, self.inner.world_size
        runs = buffer.split_with_sizes(list(splits))
        words = self.words(splits)
        leases: list[Lease] = []
        cells: list[Tensor]
        staged = self.must_stage(splits)
        if staged:
            leases.append(self.scratch(sum(words), buffer))
            cells = list(leases[0].tensor.split_with_sizes(words))
            put(cells[rank], runs[rank])
        else:
            cells = [as_carrier(run, self.carrier) for run in runs]
        own = cells[rank]
        sent, received = [own] * world_size, list(cells)
        if self.uneven:
            # The own run is in its place already: nothing travels from here to here.
            sent[rank] = received[rank] = own.narrow(0, 0, 0)
        else:
            leases.append(self.scratch(words[rank], buffer))
            received[rank] = leases[-1].tensor
        work = self.inner.all_to_all(received, sent)
        return FollowedWork([work], then=partial(_unpack, cells, runs, rank) if staged else None, leases=leases)


Gather = GatherNatively | GatherByBroadcasts | GatherByExchange


class BroadcastNatively(Route):
    """broadcast with the backend's own, as bit patterns where need be."""

    def start(self, buffer: Tensor, source: int) -> Work:
        """Afterwards the buffer holds what the source had in it."""
        if not self.stages:
            return self.inner.broadcast(as_carrier(buffer, self.carrier), source)
        lease = self.scratch(words_for(buffer.numel(), self.dtype, self.carrier), buffer)
        own = self.inner.rank == source
        if own:
            put(lease.tensor, buffer)
        work = self.inner.broadcast(lease.tensor, source)
        return FollowedWork([work], then=None if own else lambda: take(lease.tensor, buffer), leases=[lease])


@attrs.frozen(kw_only=True, eq=False)
class BroadcastByGather:
    """broadcast as an all_gather in which only the source has anything."""

    inner: Communicator
    gather: GatherNatively | GatherByExchange

    def start(self, buffer: Tensor, source: int) -> Work:
        """Afterwards the buffer holds what the source had in it."""
        splits = [0] * self.inner.world_size
        splits[source] = buffer.numel()
        return self.gather.start(buffer, splits)


class ExchangeNatively(Route):
    """all_to_all with the backend's own, as bit patterns where need be, padded where it wants even pieces."""

    def start(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        """Afterwards ``received[r]`` holds what rank ``r`` sent here."""
        if self.uneven and not self.stages:
            return self.inner.all_to_all(
                [as_carrier(piece, self.carrier) for piece in received],
                [as_carrier(piece, self.carrier) for piece in sent],
            )
        incoming = [words_for(piece.numel(), self.dtype, self.carrier) for piece in received]
        outgoing = [words_for(piece.numel(), self.dtype, self.carrier) for piece in sent]
        if not self.uneven:
            # A rank sees its own row and column only: how long the longest piece is takes everyone's word.
            longest = max(self.inner.exchange("shardrt.all_to_all sizes", max(outgoing)))
            if longest == 0:
                return FinishedWork()
            incoming, outgoing = [longest] * len(received), [longest] * len(sent)
        into, out_of = self.scratch(sum(incoming), sent[0]), self.scratch(sum(outgoing), sent[0])
        cells = into.tensor.split_with_sizes(incoming)
        staged = out_of.tensor.split_with_sizes(outgoing)
        for cell, piece in zip(staged, sent, strict=True):
            put(cell, piece)
        work = self.inner.all_to_all(cells, staged)
        return FollowedWork([work], then=partial(_unpack, cells, received, None), leases=[into, out_of])


@attrs.frozen(kw_only=True, eq=False)
class ExchangeByGather:
    """all_to_all as an all_gather of everything that everyone sends; each rank keeps its column."""

    inner: Communicator
    pool: ScratchPool
    dtype: torch.dtype
    gather: GatherNatively | GatherByBroadcasts

    def start(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        """Afterwards ``received[r]`` holds what rank ``r`` sent here."""
        rank = self.inner.rank
        rows: list[list[int]] = self.inner.exchange("shardrt.all_to_all sizes", [piece.numel() for piece in sent])
        totals = [sum(row) for row in rows]
        lease = self.pool.take(sum(totals), self.dtype, sent[0].device)
        lines = lease.tensor.split_with_sizes(totals)
        for cell, piece in zip(lines[rank].split_with_sizes(rows[rank]), sent, strict=True):
            cell.copy_(piece)
        column = [line.split_with_sizes(row)[rank] for line, row in zip(lines, rows, strict=True)]
        work = self.gather.start(lease.tensor, totals)
        return FollowedWork([work], then=partial(_unpack, column, received, None), leases=[lease])


def _unpack(cells: Sequence[Tensor], runs: Sequence[Tensor], own: int | None) -> None:
    for rank, (cell, run) in enumerate(zip(cells, runs, strict=True)):
        if rank != own and run.numel():
            take(cell, run)

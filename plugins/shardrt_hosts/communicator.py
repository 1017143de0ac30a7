"""Collectives of two levels: inside each host, and across hosts among the ranks with the same place on theirs.

Note [Once per host]: a flat reduce_scatter sends each rank's gradients to their owners, so that the link of a host with
L ranks carries every element L times. Here the ranks of a host first reduce among themselves, which leaves each with
the host's sums of 1/L of every host's runs; only those cross, among ranks of one place. A gather goes the other way:
runs cross once, and spread inside. Each level takes the runs of one host as one range, so nothing is regrouped.

Note [Bits of two levels]: sums are formed in rank order on each host, then in the order of the hosts. The bits are the
same on all ranks and in every run, but with more than two ranks other than those of a flat sum, by its rounding.
Averages divide on both levels, so that half-precision sums of a host, which are rounded in between, do not overflow.

Note [Begin and finish]: one thread begins operations, in the order of the calls; what is left when the last level has
been started is waited for by another. So the next bucket is reduced inside while this one crosses. Both levels are
used from the first thread only: their order is that of the calls too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardrt.comm import Traffic
from shardrt.comm.checks import (
    check_all_to_all,
    check_flat,
    check_gather,
    check_pieces,
    check_reduction,
    check_runs,
    check_source,
)
from shardrt.comm.pieces import piece_mover
from shardrt.comm.scratch import Lease, ScratchPool
from shardrt.comm.thread import OperationThread
from shardrt.comm.works import HandedOverWork
from shardrt.errors import CommunicationError
from shardrt.protocols import Communicator, Group, ReduceOp, SharedAllocator, Work
from shardrt_hosts.combining import combined, takes_any_runs
from shardrt_hosts.counting import TrafficOfLevels
from shardrt_hosts.layout import HostLayout
from shardrt_hosts.naming import with_ranks
from shardrt_hosts.slicing import cut_each, cut_runs, slices_for

_SMALL_BYTES = 4096
"""Up to here an all_reduce costs messages, not bytes: whole buffers on both levels save one of three steps."""
Finish = Callable[[], None]


class HostsCommunicator:
    """See :class:`shardrt.protocols.Communicator`. ``inside`` and ``across`` are backends by name, with options."""

    name = "hosts"

    def __init__(
        self,
        group: Group,
        layout: HostLayout,
        *,
        inside: str | Mapping[str, Any],
        across: str | Mapping[str, Any],
    ) -> None:
        assert group.open_among is not None
        self.rank = group.rank
        self.world_size = group.world_size
        self._group = group
        self._layout = layout
        self._issued = 0
        self._inside = group.open_among(layout.inside, inside)
        self._across = group.open_among(layout.across, across)
        self._flat = group.open_among([range(group.world_size)], across)
        self.capabilities = combined(
            self._inside.capabilities,
            self._across.capabilities,
            ranks=self._inside.world_size,
            hosts=self._across.world_size,
        )
        self._divides = takes_any_runs(self._inside.capabilities)
        self._levels = TrafficOfLevels({"inside": self._inside, "across": self._across, "flat": self._flat})
        self.traffic = self._levels.traffic
        self._scratch = ScratchPool(self.allocate)
        self._thread = self._make_thread("", abort=self._close_levels)
        self._finisher = self._make_thread("-finish", abort=self._close_levels)

    @property
    def traffic_by_level(self) -> Mapping[str, Traffic]:
        """What moved ``inside`` the host, ``across`` hosts, and ``flat`` (all_to_all, among all ranks)."""
        self._levels.count()
        return dict(self._levels.by_level)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory that the ranks of this host read where it is, if the backend inside has such."""
        return self._inside.allocate(numel, dtype) if isinstance(self._inside, SharedAllocator) else None

    def reduce_scatter(
        self,
        buffer: torch.Tensor,
        splits: Sequence[int],
        *,
        output: torch.Tensor | None = None,
        average: bool = False,
    ) -> Work:
        """Inside: each host's sums of the runs of this rank's place. Across: the sums of those."""
        check_runs("reduce_scatter", buffer, splits, self.world_size, self.rank, output=output)
        check_reduction("reduce_scatter", buffer, "sum", average, self.rank)
        runs = torch.split(buffer, list(splits))
        result = runs[self.rank] if output is None else output
        return self._reduce_scatter([[run] for run in runs], list(splits), result, average)

    def reduce_scatter_pieces(
        self, pieces: Sequence[torch.Tensor], splits: Sequence[int], *, output: torch.Tensor, average: bool = False
    ) -> Work:
        """The same, from the pieces that the runs are in."""
        runs = check_pieces("reduce_scatter", pieces, splits, self.world_size, self.rank, output=output)
        check_reduction("reduce_scatter", output, "sum", average, self.rank)
        return self._reduce_scatter(runs, list(splits), output, average)

    def _reduce_scatter(
        self, runs: Sequence[Sequence[torch.Tensor]], splits: list[int], result: torch.Tensor, average: bool
    ) -> Work:
        nbytes = sum(splits) * result.element_size()
        slices = cut_runs(runs, splits, slices_for(nbytes))

        def begin() -> Finish:
            crossing: list[Work] = []
            leases: list[Lease] = []
            arrived = 0
            for sizes, pieces in slices:
                across = [sizes[rank] for rank in self._layout.across[self._layout.place]]
                lease = self._scratch.take(sum(across), result.dtype, result.device)
                leases.append(lease)
                self._reduce_inside(pieces, sizes, torch.split(lease.tensor, across), average)
                into = result[arrived : arrived + sizes[self.rank]]
                arrived += sizes[self.rank]
                if sum(across):
                    with self._naming("reduce_scatter", "across"):
                        crossing.append(self._across.reduce_scatter(lease.tensor, across, output=into, average=average))
            return self._finishing("reduce_scatter", "across", crossing, *leases)

        return self._submit("reduce_scatter", begin, nbytes)

    def _reduce_inside(
        self,
        pieces: Sequence[Sequence[torch.Tensor]],
        sizes: Sequence[int],
        sums: Sequence[torch.Tensor],
        average: bool,
    ) -> None:
        """For each host, the sums of this host's ranks of what belongs to the rank of this place there."""
        mover = piece_mover(self._inside)
        works: list[Work] = []
        with self._naming("reduce_scatter", "inside"):
            for host, ranks in enumerate(self._layout.inside):
                own = [sizes[rank] for rank in ranks]
                if sum(own):
                    of_host = [piece for rank in ranks for piece in pieces[rank]]
                    works.append(mover.reduce_scatter_pieces(of_host, own, output=sums[host], average=average))
        self._wait("reduce_scatter", "inside", works)

    def all_gather(self, buffer: torch.Tensor, splits: Sequence[int]) -> Work:
        """Across: the runs of this rank's place. Inside: those of all places."""
        check_runs("all_gather", buffer, splits, self.world_size, self.rank)
        runs = torch.split(buffer, list(splits))
        return self._all_gather(runs[self.rank], runs)

    def all_gather_from(self, own: torch.Tensor, runs: Sequence[torch.Tensor]) -> Work:
        """The same, with this rank's run taken from where it is."""
        check_gather("all_gather", own, runs, self.world_size, self.rank)
        return self._all_gather(own, runs)

    def _all_gather(self, own: torch.Tensor, runs: Sequence[torch.Tensor]) -> Work:
        layout = self._layout
        nbytes = sum(run.nbytes for run in runs)
        # What crosses leaves from where it is, and arrives where it is wanted.
        given = [own if rank == self.rank else run for rank, run in enumerate(runs)]
        slices = cut_each(given, slices_for(nbytes))

        def gather(level: Communicator, own: torch.Tensor, into: Sequence[torch.Tensor]) -> list[Work]:
            """Nothing where nobody has anything, which everybody knows."""
            return [piece_mover(level).all_gather_from(own, into)] if sum(run.numel() for run in into) else []

        def begin() -> Finish:
            with self._naming("all_gather", "across"):
                crossing = [
                    gather(self._across, parts[self.rank], [parts[rank] for rank in layout.across[layout.place]])
                    for parts in slices
                ]
            # This host's own runs need not wait for the others'.
            with self._naming("all_gather", "inside"):
                works = gather(self._inside, own, [runs[rank] for rank in layout.inside[layout.host]])
            for parts, arriving in zip(slices, crossing, strict=True):
                self._wait("all_gather", "across", arriving)
                with self._naming("all_gather", "inside"):
                    for host, ranks in enumerate(layout.inside):
                        if host != layout.host:
                            works += gather(self._inside, parts[ranks[layout.place]], [parts[rank] for rank in ranks])
            return self._finishing("all_gather", "inside", works)

        return self._submit("all_gather", begin, nbytes)

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = "sum", average: bool = False) -> Work:
        """Inside an even run on each rank, across those, inside the runs of all; small buffers whole on both levels."""
        check_flat("all_reduce", buffer, self.rank)
        check_reduction("all_reduce", buffer, op, average, self.rank)
        share, rest = divmod(buffer.numel(), self._inside.world_size)
        sizes = [share + (place < rest) for place in range(self._inside.world_size)]
        is_divided = op == "sum" and buffer.nbytes > _SMALL_BYTES and self._divides
        run = torch.split(buffer, sizes)[self._layout.place] if is_divided else buffer

        def begin() -> Finish:
            with self._naming("all_reduce", "inside"):
                first = (
                    self._inside.reduce_scatter(buffer, sizes, average=average)
                    if is_divided
                    else self._inside.all_reduce(buffer, op=op, average=average)
                )
            self._wait("all_reduce", "inside", [first])
            with self._naming("all_reduce", "across"):
                second = self._across.all_reduce(run, op=op, average=average)
            if not is_divided:
                return self._finishing("all_reduce", "across", [second])
            self._wait("all_reduce", "across", [second])
            with self._naming("all_reduce", "inside"):
                third = self._inside.all_gather(buffer, sizes)
            return self._finishing("all_reduce", "inside", [third])

        return self._submit("all_reduce", begin, buffer.nbytes)

    def all_to_all(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Work:
        """Every byte has one sender and one receiver: two levels would only send it twice."""
        check_all_to_all(received, sent, self.world_size, self.rank)

        def begin() -> Finish:
            with self._naming("all_to_all", "flat"):
                work = self._flat.all_to_all(received, sent)
            return self._finishing("all_to_all", "flat", [work])

        return self._submit("all_to_all", begin, sum(piece.nbytes for piece in sent))

    def broadcast(self, buffer: torch.Tensor, source: int) -> Work:
        """Across among the ranks of the source's place, then inside from those."""
        check_flat("broadcast", buffer, self.rank)
        check_source("broadcast", source, self.world_size, self.rank)
        place = next(number for number, ranks in enumerate(self._layout.across) if source in ranks)
        host = self._layout.across[place].index(source)

        def begin() -> Finish:
            if self._layout.place == place:
                with self._naming("broadcast", "across"):
                    work = self._across.broadcast(buffer, host)
                self._wait("broadcast", "across", [work])
            with self._naming("broadcast", "inside"):
                work = self._inside.broadcast(buffer, place)
            return self._finishing("broadcast", "inside", [work])

        return self._submit("broadcast", begin, buffer.nbytes)

    def barrier(self) -> None:
        """All of a host have come; then all of one place on all hosts have, and with them everybody."""

        def begin() -> Finish:
            with self._naming("barrier", "inside"):
                self._inside.barrier()
            with self._naming("barrier", "across"):
                self._across.barrier()
            return self._levels.count

        self._submit("barrier", begin, 0).wait()

    def exchange(self, topic: str, value: Any) -> list[Any]:
        """Small JSON values, over the control channel."""
        return self._group.control.exchange(topic, value)

    def close(self) -> None:
        """End the threads of all levels."""
        self._thread.close()
        self._finisher.close()
        self._close_levels()

    def _close_levels(self) -> None:
        for communicator in (self._inside, self._across, self._flat):
            communicator.close()

    def _wait(self, operation: str, level: str, works: Sequence[Work]) -> None:
        with self._naming(operation, level):
            for work in works:
                work.wait()
        self._thread.note_progress()

    def _finishing(self, operation: str, level: str, works: Sequence[Work], *leases: Lease) -> Finish:
        def finish() -> None:
            self._wait(operation, level, works)
            for lease in leases:
                lease.release()
            self._levels.count()

        return finish

    def _submit(self, operation: str, begin: Callable[[], Finish], nbytes: int) -> Work:
        self._issued += 1
        number = self._issued
        described = f"{operation} (number {number} of communicator {self._group.number})"
        finishing: list[Work] = []

        def run() -> None:
            finish = begin()
            finishing.append(self._finisher.submit(described, finish, record=self._thread.hand_over()))

        first = self._thread.submit(described, run, bytes=nbytes, communicator=self._group.number, number=number)
        return HandedOverWork(first, finishing)

    def _make_thread(self, suffix: str, abort: Callable[[], None]) -> OperationThread:
        return OperationThread(
            name=f"shardrt-hosts-{self._group.number}{suffix}",
            rank=self.rank,
            timeout=self._group.timeout,
            control=self._group.control,
            abort=abort,
            timeline=self._group.timeline,
            flight=self._group.flight,
        )

    @contextmanager
    def _naming(self, operation: str, level: str) -> Iterator[None]:
        """Errors of a level count its own ranks: tell them by the numbers that they have here."""
        try:
            yield
        except CommunicationError as error:
            layout = self._layout
            ranks = {
                "inside": layout.inside[layout.host],
                "across": layout.across[layout.place],
                "flat": tuple(range(self.world_size)),
            }[level]
            where = {"inside": "inside this host", "across": "across hosts", "flat": "among all ranks"}[level]
            failure = CommunicationError(
                f"rank {self.rank}: {operation} of communicator {self._group.number} failed {where}: "
                f"{with_ranks(str(error), ranks)}"
            )
            failure.ranks = tuple(ranks[one] for one in error.ranks if one < len(ranks))
            raise failure from error

"""The collectives as steps: what each rank lays out, and what it takes.

Note [Begun by the caller]: an operation runs on its communicator's thread, which has to be woken for it. Peers would
wait that long for data that is there already. So a caller that finds the thread idle tells them itself, where that
takes no waiting and little copying: the data lies in shared memory, or fits into one slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from shardrt.errors import CommunicationError
from shardrt_shm.area import Note
from shardrt_shm.arena import Place, process_arena
from shardrt_shm.joining import Joined
from shardrt_shm.mapping import PAGE, move
from shardrt_shm.pieces import Pieces
from shardrt_shm.sums import Summing

_SMALL_BYTES = PAGE
"""Up to here every rank reads everything of all others, which takes one meeting instead of two."""
_LINE = 64
_MASK = 0xFFFF_FFFF


@attrs.define(kw_only=True, eq=False)
class Exchange:
    """What is laid out and taken in the steps of an operation. See :meth:`shardrt_shm.steps.Steps.run`."""

    words: str
    """What all ranks must have alike."""
    count: int | None
    write: Callable[[int, int], None] | None = None
    read: Callable[[int, int], None] | None = None
    place: Place | None = None
    """Where peers read this rank's data; None where it goes through slots."""
    sizes: tuple[int, ...] = ()
    meet: Callable[[], int] | None = None
    first: Callable[[], None] = lambda: None
    """What this rank does for itself."""
    begun: int | None = None
    """The number of its note, where it was begun ahead."""


class Transfers:
    """Runs one operation at a time, on the thread of its communicator."""

    def __init__(self, joined: Joined, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._own = joined.own
        self._areas = joined.areas
        self._peers = joined.peers
        self._steps = joined.steps
        self._slot_bytes = joined.layout.slot_bytes
        self._cell_bytes = self._slot_bytes // max(1, world_size - 1) // _LINE * _LINE
        self._summing = Summing()
        self._joined_pieces: dict[torch.dtype, torch.Tensor] = {}
        self._noted = 0
        self._notes: dict[int, Note] = {}

    def meet(self, words: str) -> Exchange:
        """Nothing moves."""
        return Exchange(words=words, count=1)

    def reduce(
        self, words: str, pieces: Pieces, sizes: Sequence[int], result: torch.Tensor, op: str, *, average: bool
    ) -> Exchange:
        """Each rank's run, reduced, in its owner's result."""
        dtype = result.dtype
        cell = self._cell_bytes // dtype.itemsize
        starts = _starts(sizes)
        place = pieces.place()
        divide_by = self.world_size if average else 1

        def write(step: int, at: int) -> None:
            slot = self._own.slot(at, dtype)
            for index, peer in enumerate(self._areas):
                begin = step * cell
                count = min(cell, sizes[peer] - begin)
                if count > 0:
                    pieces.copy_to(slot[index * cell : index * cell + count], starts[peer] + begin)

        def read(step: int, at: int) -> None:
            begin = step * cell
            count = min(cell, sizes[self.rank] - begin)
            if count <= 0:
                return
            first = starts[self.rank] + begin
            sources = {
                peer: self._found(peer, at, dtype, self._cell_of(peer) * cell, first, count) for peer in self._areas
            }
            parts = pieces.parts(first, first + count)
            # Small enough to be still in the cache when it is added.
            own = parts[0] if len(parts) == 1 else torch.cat(parts, out=self._scratch(dtype, count))
            runs = [own if rank == self.rank else sources[rank] for rank in range(self.world_size)]
            self._summing.combine(runs, result[begin : begin + count], op, divide_by=divide_by)

        count = _steps(sizes, cell)
        return Exchange(words=words, count=count, write=None if place else write, read=read, place=place)

    def spread(self, words: str, runs: Sequence[torch.Tensor], own: torch.Tensor) -> Exchange:
        """Each rank's run, on all ranks; this rank's is ``own``, which need not be among the runs."""
        dtype = own.dtype
        cell = self._slot_bytes // dtype.itemsize
        # Copying what fits into one slot takes less time than waiting until all have read it where it is.
        place = process_arena().find(own) if own.nbytes > self._slot_bytes else None

        def first() -> None:
            if own.data_ptr() != runs[self.rank].data_ptr():
                move(runs[self.rank], own)

        def write(step: int, at: int) -> None:
            part = own[step * cell : (step + 1) * cell]
            move(self._own.slot(at, dtype)[: part.numel()], part)

        def read(step: int, at: int) -> None:
            for peer, run in self._other_runs(runs):
                if self._notes[peer].place is None:
                    part = run[step * cell : (step + 1) * cell]
                    move(part, self._areas[peer].slot(at, dtype)[: part.numel()])
                elif step == 0:  # all of it at once
                    move(run, self._found(peer, at, dtype, 0, 0, run.numel()))

        count = _steps([run.numel() for run in runs], cell)
        return Exchange(words=words, count=count, write=None if place else write, read=read, place=place, first=first)

    def all_reduce(
        self, words: str, buffer: torch.Tensor, sizes: Sequence[int], op: str, *, average: bool
    ) -> list[Exchange]:
        """The reduction on all ranks, the same bits everywhere."""
        if is_small(buffer):
            return [self._all_reduce_at_once(words, buffer, op, average=average)]
        runs = list(torch.split(buffer, list(sizes)))
        return [
            self.reduce(words, Pieces([buffer]), sizes, runs[self.rank], op, average=average),
            self.spread(words, runs, runs[self.rank]),
        ]

    def _all_reduce_at_once(self, words: str, buffer: torch.Tensor, op: str, *, average: bool) -> Exchange:
        dtype, count = buffer.dtype, buffer.numel()

        def write(step: int, at: int) -> None:
            move(self._own.slot(at, dtype)[:count], buffer)

        def read(step: int, at: int) -> None:
            if count:
                areas = [self._own if rank == self.rank else self._areas[rank] for rank in range(self.world_size)]
                runs = [area.slot(at, dtype)[:count] for area in areas]
                self._summing.combine(runs, buffer, op, divide_by=self.world_size if average else 1)

        return Exchange(words=words, count=1, write=write, read=read)

    def all_to_all(self, words: str, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Exchange:
        """What each rank sends to each; sizes are known to sender and receiver only."""
        dtype = sent[0].dtype
        cell = self._cell_bytes // dtype.itemsize

        def first() -> None:
            move(received[self.rank], sent[self.rank])

        def write(step: int, at: int) -> None:
            slot = self._own.slot(at, dtype)
            for index, peer in enumerate(self._areas):
                part = sent[peer][step * cell : (step + 1) * cell]
                move(slot[index * cell : index * cell + part.numel()], part)

        def read(step: int, at: int) -> None:
            for peer, run in self._other_runs(received):
                part = run[step * cell : (step + 1) * cell]
                begin = self._cell_of(peer) * cell
                move(part, self._areas[peer].slot(at, dtype)[begin : begin + part.numel()])

        def longest() -> int:
            for peer, run in self._other_runs(received):
                if self._notes[peer].sizes[self.rank] != run.numel():
                    raise CommunicationError(
                        f"rank {self.rank}: {self._steps.operation}: rank {peer} sends "
                        f"{self._notes[peer].sizes[self.rank]} elements, here is room for {run.numel()}; sizes must "
                        "match pairwise"
                    )
            tables = [sizes, *(note.sizes for note in self._notes.values())]
            return max(_steps(table, cell) for table in tables)

        sizes = tuple(piece.numel() for piece in sent)
        return Exchange(words=words, count=None, write=write, read=read, sizes=sizes, meet=longest, first=first)

    def broadcast(self, words: str, buffer: torch.Tensor, source: int) -> Exchange:
        """The source's buffer, on all ranks."""
        dtype = buffer.dtype
        cell = self._slot_bytes // dtype.itemsize
        place = process_arena().find(buffer) if source == self.rank else None

        def write(step: int, at: int) -> None:
            part = buffer[step * cell : (step + 1) * cell]
            move(self._own.slot(at, dtype)[: part.numel()], part)

        def read(step: int, at: int) -> None:
            if self._notes[source].place is None:
                part = buffer[step * cell : (step + 1) * cell]
                move(part, self._areas[source].slot(at, dtype)[: part.numel()])
            elif step == 0:
                move(buffer, self._found(source, at, dtype, 0, 0, buffer.numel()))

        is_source = source == self.rank
        return Exchange(
            words=words,
            count=_steps([buffer.numel()], cell),
            write=write if is_source and place is None else None,
            read=None if is_source else read,
            place=place,
        )

    def begin(self, exchange: Exchange) -> None:
        """See Note [Begun by the caller]."""
        if exchange.count is None or (exchange.write is not None and exchange.count > 1):
            return
        number = self._write_note(exchange)
        if self._steps.begin(exchange.count, write=exchange.write):
            exchange.begun = number
        else:
            self._noted = (number - 1) & _MASK  # it is written again when it is the thread's turn

    def run(self, exchange: Exchange) -> None:
        """All steps of an operation, or those that are left."""
        words, meet, begun = exchange.words, exchange.meet, exchange.begun
        number = self._write_note(exchange) if begun is None else begun
        exchange.first()

        def look() -> int | None:
            self._notes = {peer: area.read(number, sizes=bool(exchange.sizes)) for peer, area in self._areas.items()}
            for peer, note in self._notes.items():
                if (note.number, note.signature) != (number, words):
                    error = CommunicationError(
                        f"rank {self.rank}: {self._steps.operation} meets another call: rank {self.rank} is at "
                        f"{words!r}, rank {peer} is at {note.signature!r}; every rank must make the same calls in the "
                        "same order"
                    )
                    error.ranks = (peer,)
                    raise error
            return None if meet is None else meet()

        self._steps.run(
            exchange.count,
            write=exchange.write,
            read=exchange.read,
            meet=look,
            is_in_place=exchange.place is not None,
            has_begun=begun is not None,
        )

    def _write_note(self, exchange: Exchange) -> int:
        self._noted = (self._noted + 1) & _MASK
        self._own.write(Note(number=self._noted, signature=exchange.words, place=exchange.place, sizes=exchange.sizes))
        return self._noted

    def _found(self, peer: int, at: int, dtype: torch.dtype, in_slot: int, in_place: int, count: int) -> torch.Tensor:
        """Elements of a peer: in its slot, or in its memory where it has said that they are."""
        place = self._notes[peer].place
        if place is None:
            return self._areas[peer].slot(at, dtype)[in_slot : in_slot + count]
        whole = self._peers[peer].read(place.offset, place.length)
        begin = place.position + in_place * dtype.itemsize
        return whole[begin : begin + count * dtype.itemsize].view(dtype)

    def _scratch(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        kept = self._joined_pieces.get(dtype)
        if kept is None:
            kept = self._joined_pieces[dtype] = torch.empty(self._cell_bytes // dtype.itemsize, dtype=dtype)
        return kept[:count]

    def _other_runs(self, runs: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
        return [(peer, runs[peer]) for peer in self._areas]

    def _cell_of(self, peer: int) -> int:
        """Which cell of a peer's slot is for this rank: it has none for itself."""
        return self.rank if self.rank < peer else self.rank - 1


def is_small(buffer: torch.Tensor) -> bool:
    """Whether an all_reduce is better done by everybody."""
    return buffer.nbytes <= _SMALL_BYTES


def _starts(sizes: Sequence[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


def _steps(sizes: Sequence[int], cell: int) -> int:
    return max(1, -(-max(sizes, default=0) // cell))

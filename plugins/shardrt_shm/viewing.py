"""The runs of all ranks side by side in this rank's address space, without a copy.

Note [Windows]: a run is some bytes of its owner's file, and a file can be mapped at any address, page by page. So a
view is a stretch of addresses into which the pages of each run are mapped one behind the other. For that a run must
begin as far into a page of its file as it does in the view; whoever allocates it sees to that. Pages in which one run
ends and the next begins are no single file's: they are this rank's own, and their few bytes are copied when owners have
written them (:meth:`Window.complete`).

Note [Private pages]: files are mapped privately. Reading shows the owner's memory as it is at that moment; a page that
this rank writes to becomes its own copy, which nobody else sees, and which no longer follows its owner until it is
dropped (:meth:`Window.renew`). So a peer's memory cannot be written to, whatever code computes with a view.

Note [Runs that linger]: a rank may drop a model when a peer still computes with a view of it, and memory that is given
back reads as zeros. So a run that was shown outlives its view, until all these peers take part in a call for new views,
or have ended: by then they have left whatever they were computing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import attrs
import torch

from shardrt.errors import CommunicationError
from shardrt_shm.arena import Place, process_arena
from shardrt_shm.mapping import PAGE, Stretch, whole_pages
from shardrt_shm.peers import Peer, Process

_MOST_MAPPINGS = 24_576
"""Of all views of one call. The system allows each process some 65,000, of which the trainer needs some too."""
_MAPPINGS_PER_RUN = 3
"""Its pages, the page in which it ends, and its whole range, out of which the bytes of that page are copied."""
_lingering: list[tuple[frozenset[Process], torch.Tensor]] = []
"""See Note [Runs that linger]."""


@attrs.frozen(kw_only=True)
class RunOfRank:
    """One rank's run: where it lies in its owner's file, and the bytes that it takes in the view."""

    place: Place
    start: int
    nbytes: int

    @property
    def fits(self) -> bool:
        """Whether it begins as far into a page of the file as in the view."""
        return (self.place.position - self.start) % PAGE == 0

    @property
    def pages(self) -> tuple[int, int]:
        """The bytes of the view that whole pages of the run fill; nothing where it fills none."""
        first, last = whole_pages(self.start), (self.start + self.nbytes) // PAGE * PAGE
        return first, max(first, last)

    def at(self, byte: int) -> int:
        """Where in the owner's range a byte of the view lies."""
        return self.place.position + byte - self.start


class Window:
    """See :class:`shardrt.protocols.RunView`, and Note [Windows]."""

    def __init__(
        self, own: torch.Tensor, runs: Sequence[RunOfRank], peers: Sequence[Peer | None], dtype: torch.dtype
    ) -> None:
        """``own`` is this rank's run, whose place in ``peers`` is None."""
        self._rank = peers.index(None)
        nbytes = runs[-1].start + runs[-1].nbytes
        self._stretch = Stretch(whole_pages(nbytes))
        self._seams: list[tuple[int, torch.Tensor]] = []
        """Addresses, and the bytes that are copied there."""
        for run, peer in zip(runs, peers, strict=True):
            first, last = run.pages
            if last > first:
                fd = process_arena().fd if peer is None else peer.checked(run.place.offset, run.place.length)
                self._stretch.show(first, last - first, fd, run.place.offset + run.at(first))
            edges = [(run.start, min(first, run.start + run.nbytes)), (max(last, run.start), run.start + run.nbytes)]
            for begin, end in edges if last > first else [(run.start, run.start + run.nbytes)]:
                if end > begin:
                    source = (
                        own.view(torch.uint8)[begin - run.start : end - run.start]
                        if peer is None
                        else peer.read(run.place.offset, run.place.length)[run.at(begin) : run.at(end)]
                    )
                    self._seams.append((begin, source))
        self.whole = self._stretch.memory[:nbytes].view(dtype)
        """All runs."""
        others = frozenset(peer.process for peer in peers if peer is not None)
        weakref.finalize(self, _lingering.append, (others, own)).atexit = False

    def complete(self) -> None:
        """Copy what lies in pages of two ranks."""
        for begin, source in self._seams:
            self._stretch.put(begin, source)

    def renew(self) -> None:
        """See Note [Private pages]."""
        try:
            self._stretch.drop()
        except OSError as error:
            raise CommunicationError(
                f"rank {self._rank}: a view of {self.whole.nbytes} bytes of shared memory cannot be renewed: {error}; "
                "memory that is locked (mlockall) cannot, so do not lock it, or choose backend='gloo'"
            ) from error


def view_runs(
    asked: Sequence[tuple[torch.Tensor, Sequence[int]]],
    rank: int,
    peers: dict[int, Peer],
    gather: Callable[[torch.Tensor], None],
    agree: Callable[[torch.Tensor], None],
) -> list[Window | None]:
    """See :class:`shardrt.protocols.RunViewer`.

    ``gather`` fills a table, of which each rank has written its own row; ``agree`` takes the least of all ranks'.
    """
    ranks = len(peers) + 1
    table = torch.full((ranks, len(asked), 3), -1, dtype=torch.int64)
    for index, (own, _) in enumerate(asked):
        place = process_arena().find(own)
        if place is not None:
            table[rank, index] = torch.tensor([place.offset, place.length, place.position])
    gather(table)
    _let_go({peer.process for peer in peers.values()})
    told = [[None if row[0] < 0 else Place(*row) for row in rows] for rows in table.tolist()]
    is_too_much = len(asked) * ranks * _MAPPINGS_PER_RUN > _MOST_MAPPINGS
    made: list[Window | None] = []
    for index, (own, splits) in enumerate(asked):
        runs = None if is_too_much else _runs([rows[index] for rows in told], splits, own.element_size())
        made.append(None if runs is None else _window(own, runs, [peers.get(other) for other in range(ranks)]))
    # A rank that cannot map what others can would be waited for by them.
    found = torch.tensor([one is not None for one in made], dtype=torch.int8)
    agree(found)
    return [one if everywhere else None for one, everywhere in zip(made, found.tolist(), strict=True)]


def _let_go(met: set[Process]) -> None:
    """These peers have come to this point. See Note [Runs that linger]."""
    _lingering[:] = [
        (readers, own) for readers, own in _lingering if any(one not in met and not one.has_ended for one in readers)
    ]


def _runs(places: Sequence[Place | None], splits: Sequence[int], itemsize: int) -> list[RunOfRank] | None:
    """Where each rank's run lies; None where some lie elsewhere than in shared memory, or not as they must."""
    runs: list[RunOfRank] = []
    start = 0
    for place, count in zip(places, splits, strict=True):
        nbytes = count * itemsize
        if nbytes:
            if place is None:
                return None
            run = RunOfRank(place=place, start=start, nbytes=nbytes)
            if not run.fits or place.position + nbytes > place.length:
                return None
            runs.append(run)
        else:
            runs.append(RunOfRank(place=Place(0, 0, 0), start=start, nbytes=0))
        start += nbytes
    return runs if start else None


def _window(own: torch.Tensor, runs: Sequence[RunOfRank], peers: Sequence[Peer | None]) -> Window | None:
    try:
        with torch.inference_mode(False):
            return Window(own, runs, peers, own.dtype)
    except OSError:  # too many mappings for the system
        return None

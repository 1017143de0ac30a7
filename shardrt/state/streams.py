"""Bytes of many tensors, spread over ranks, brought to one rank or to all in windows of a bounded size.

Note [Streams]: what a rank has to give is one stream: its tensors' bytes one after the other, in an order that all
ranks know. In each round every rank sends the next window of its stream, so small tensors cost no messages of their
own, the memory is bounded by the windows, and the number of rounds follows from the longest stream. A window that lies
inside one tensor is sent from there and received into its destination; only one that spans several is copied.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch

from shardrt.protocols import Communicator

WINDOW_BYTES = 32 * 2**20
"""What one rank holds at most beside its own share, over all peers."""

Give = Callable[[int], torch.Tensor]
"""The tensor of a number, in this rank's stream. Asked for again in each window, so that none need be kept."""
Place = Callable[[int, int], torch.Tensor | None]
"""Where the tensor of a rank's stream goes, by rank and number: a contiguous tensor, or None where nobody wants it."""


class Stream:
    """The sizes in bytes of the tensors of one rank, and where each begins.

    Example:
        >>> from shardrt.state.streams import Stream
        >>> list(Stream([4, 0, 6]).parts(2, 8))
        [(0, 2, 4), (2, 0, 4)]
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._starts = [0, *accumulate(sizes)]
        self.nbytes = self._starts[-1]

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The tensors that the bytes ``[start, stop)`` are of: number, first and last byte in that tensor."""
        number = max(bisect_right(self._starts, start) - 1, 0)
        while start < stop:
            begin, end = self._starts[number], self._starts[number + 1]
            if end > start:
                upto = min(end, stop)
                yield number, start - begin, upto - begin
                start = upto
            number += 1


def gather_streams(
    communicator: Communicator,
    streams: Sequence[Stream],
    give: Give,
    place: Place,
    *,
    to: int | None,
    device: torch.device,
    window_bytes: int = WINDOW_BYTES,
) -> None:
    """Bring the bytes of all streams, one per rank, to one rank or, with ``to=None``, to all.

    Every rank calls it alike. What this rank itself gives is copied to its places too. ``device`` is where the
    communicator moves bytes.
    """
    rank, world_size = communicator.rank, communicator.world_size
    window = max(window_bytes // max(world_size, 1), 1)
    wanted = to is None or to == rank
    rounds = -(-max(stream.nbytes for stream in streams) // window)
    for number in range(rounds):
        runs = [(min(number * window, stream.nbytes), min((number + 1) * window, stream.nbytes)) for stream in streams]
        sent = _window(streams[rank], runs[rank], lambda part: give(part), device)
        if world_size == 1:
            _store(streams[0], runs[0], sent, lambda part: place(0, part))
            continue
        arrivals = _arrivals(streams, runs, place, rank, wanted, device)
        nothing = sent[:0]
        communicator.all_to_all(
            [nothing if peer == rank else arrivals[peer] for peer in range(world_size)],
            [nothing if peer == rank or to not in (None, peer) else sent for peer in range(world_size)],
        ).wait()
        if wanted:
            for peer in range(world_size):
                got = sent if peer == rank else arrivals[peer]
                _store(streams[peer], runs[peer], got, lambda part, peer=peer: place(peer, part))  # type: ignore[misc]


def _arrivals(
    streams: Sequence[Stream],
    runs: Sequence[tuple[int, int]],
    place: Place,
    rank: int,
    wanted: bool,
    device: torch.device,
) -> list[torch.Tensor]:
    """Where each peer's window arrives: in its destination itself, where it is of one tensor."""
    found = []
    for peer, (start, stop) in enumerate(runs):
        if not wanted or peer == rank:
            found.append(torch.empty(0, dtype=torch.int8, device=device))
            continue
        parts = list(streams[peer].parts(start, stop))
        target = place(peer, parts[0][0]) if len(parts) == 1 else None
        if target is not None and target.device.type == device.type:
            found.append(as_bytes(target)[parts[0][1] : parts[0][2]])
        else:
            found.append(torch.empty(stop - start, dtype=torch.int8, device=device))
    return found


def _window(
    stream: Stream, run: tuple[int, int], tensor: Callable[[int], torch.Tensor], device: torch.device
) -> torch.Tensor:
    parts = [as_bytes(tensor(number))[start:stop] for number, start, stop in stream.parts(*run)]
    if len(parts) == 1:
        return parts[0].to(device)
    packed = torch.empty(run[1] - run[0], dtype=torch.int8, device=device)
    position = 0
    for part in parts:
        packed[position : position + part.numel()].copy_(part)
        position += part.numel()
    return packed


def _store(
    stream: Stream, run: tuple[int, int], got: torch.Tensor, target: Callable[[int], torch.Tensor | None]
) -> None:
    position = 0
    for number, start, stop in stream.parts(*run):
        place = target(number)
        size = stop - start
        if place is not None:
            here = as_bytes(place)[start:stop]
            piece = got[position : position + size]
            if here.data_ptr() != piece.data_ptr():
                here.copy_(piece)
        position += size


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, flat: a view where its elements lie in row-major order, else a copy.

    Example:
        >>> import torch
        >>> from shardrt.state.streams import as_bytes
        >>> as_bytes(torch.tensor([1, 2], dtype=torch.int16)).tolist()
        [1, 0, 2, 0]
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.numel() == 1:  # it may be of a tensor with gaps, and lies as well without them
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.int8)

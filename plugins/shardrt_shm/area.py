"""What one rank of a communicator shows to its peers: two counters, what it is doing, and slots for data on the way.

Every rank writes its own area only, and reads those of the others.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import attrs
import torch

from shardrt_shm.arena import Place
from shardrt_shm.mapping import PAGE, whole_pages

SLOTS = 4
"""Steps whose data may be on the way at once: writers go ahead of readers by as many."""
GONE, OPEN, CLOSED = 0, 1, 2
"""States of an area. Memory that was given back reads as zeros, so this is what a peer sees of one that is gone."""
_LINE = 64
"""Counters that are written by different threads at different times lie in different lines of the cache."""
_READY, _DONE, _STATE = 0, 2 * _LINE, 4 * _LINE
_NOTES = 6 * _LINE
_FIXED = struct.Struct("<IIQQQH")
_TEXT_BYTES = 256 - _FIXED.size


@attrs.frozen(kw_only=True)
class Note:
    """What a rank says of the operation it is at."""

    number: int
    signature: str
    """What all ranks must have alike."""
    place: Place | None = None
    """Where peers find the data of the whole operation; None where it comes through the slots."""
    sizes: tuple[int, ...] = ()
    """Bytes for each rank, where only the sender knows them."""


@attrs.frozen(kw_only=True)
class AreaLayout:
    """Where everything lies in an area; the same on all ranks."""

    world_size: int
    slot_bytes: int

    @property
    def note_bytes(self) -> int:
        """Of one note, with its table of sizes."""
        return -(-(_FIXED.size + _TEXT_BYTES + 8 * self.world_size) // _LINE) * _LINE

    @property
    def slots_at(self) -> int:
        """Where the first slot begins."""
        return whole_pages(_NOTES + 2 * self.note_bytes)

    @property
    def nbytes(self) -> int:
        """Of the whole area."""
        return self.slots_at + SLOTS * self.slot_bytes


class Area:
    """One rank's area, as its owner or a peer sees it.

    Example:
        >>> import torch
        >>> from shardrt_shm.area import Area, AreaLayout, Note
        >>> layout = AreaLayout(world_size=2, slot_bytes=4096)
        >>> area = Area(layout, torch.zeros(layout.nbytes, dtype=torch.uint8))
        >>> area.write(Note(number=7, signature="barrier", sizes=(1, 2)))
        >>> area.read(7).signature, area.read(7).sizes, area.ready.value
        ('barrier', (1, 2), 0)
    """

    def __init__(self, layout: AreaLayout, memory: torch.Tensor) -> None:
        self._layout = layout
        self._memory = memory
        self._address = memory.data_ptr()
        self.ready = self._word(_READY)
        """Steps whose data is there to be read."""
        self.done = self._word(_DONE)
        """Steps in which this rank has read all that it wanted from its peers."""
        self.state = self._word(_STATE)
        """One of ``GONE``, ``OPEN`` and ``CLOSED``."""
        slots = memory.narrow(0, layout.slots_at, SLOTS * layout.slot_bytes)
        self._slots: dict[torch.dtype, list[torch.Tensor]] = {torch.uint8: list(torch.split(slots, layout.slot_bytes))}

    def slot(self, step: int, dtype: torch.dtype) -> torch.Tensor:
        """The slot that the data of a step goes through."""
        if dtype not in self._slots:
            self._slots[dtype] = [slot.view(dtype) for slot in self._slots[torch.uint8]]
        return self._slots[dtype][step % SLOTS]

    def write(self, note: Note) -> None:
        """Say what this rank is at. The note before the last is overwritten, which everybody has read."""
        place = note.place or Place(0, 0, 0)
        text = note.signature.encode()[:_TEXT_BYTES]
        head = _FIXED.pack(note.number, note.place is not None, place.offset, place.length, place.position, len(text))
        sizes = struct.pack(f"<{len(note.sizes)}Q", *note.sizes)
        whole = head + text.ljust(_TEXT_BYTES, b"\0") + sizes
        ctypes.memmove(self._note_at(note.number), whole, len(whole))

    def read(self, number: int, *, sizes: bool = True) -> Note:
        """What the rank says of an operation."""
        found = ctypes.string_at(self._note_at(number), self._layout.note_bytes)
        told, is_placed, offset, length, position, text_bytes = _FIXED.unpack_from(found)
        text = found[_FIXED.size : _FIXED.size + min(text_bytes, _TEXT_BYTES)].decode(errors="replace")
        table: Sequence[int] = ()
        if sizes:
            table = struct.unpack_from(f"<{self._layout.world_size}Q", found, _FIXED.size + _TEXT_BYTES)
        place = Place(offset, length, position) if is_placed else None
        return Note(number=told, signature=text, place=place, sizes=tuple(table))

    def _note_at(self, number: int) -> int:
        return self._address + _NOTES + number % 2 * self._layout.note_bytes

    def _word(self, at: int) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_address(self._address + at)


def slot_size(megabytes: float) -> int:
    """Bytes of a slot: whole pages, so that any number of ranks' cells begin at a line of the cache.

    Example:
        >>> from shardrt_shm.area import slot_size
        >>> slot_size(0.5)
        524288
    """
    return max(PAGE, whole_pages(int(megabytes * 2**20)))

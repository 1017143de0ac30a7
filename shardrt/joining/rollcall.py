"""Who still has inputs, and what they are about to do: one small all-gather that every rank takes part in."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import attrs
import torch

from shardrt.errors import HandshakeError
from shardrt.protocols import Communicator

_ROW = struct.Struct("<BIIIB46s")
"""Whether active; check sum of the settings and their length; check sum of the event, its length and its beginning."""
_BEGINNING = 46
_TOO_LONG = 255


@attrs.frozen(kw_only=True)
class _Row:
    active: bool
    settings_mark: int
    settings_length: int
    event_mark: int
    event_length: int
    beginning: str


@attrs.frozen(kw_only=True)
class Roll:
    """What a roll call found, the same on all ranks."""

    active: tuple[int, ...]
    """The ranks that have inputs."""
    event: str = ""
    """What they are about to do; empty if there are none."""
    settings: str | None = None
    """Those of the first active rank, where a rank without inputs has others."""


class RollCall:
    """Calls the roll over a communicator.

    Example:
        >>> from shardrt import Group, load_registry
        >>> from shardrt.comm.control import LocalControl
        >>> from shardrt.joining.rollcall import RollCall
        >>> alone = Group(rank=0, world_size=1, device_type="cpu", timeout=30.0, control=LocalControl())
        >>> roll_call = RollCall(load_registry().backends.get("cpu", "null").factory(alone), "cpu")
        >>> roll_call.call("step", settings="lr 0.1")
        Roll(active=(0,), event='step', settings=None)
        >>> roll_call.call(None, settings="lr 0.1").active
        ()
    """

    def __init__(self, communicator: Communicator, device_type: str) -> None:
        self._communicator = communicator
        self._device = torch.device(device_type)
        self._rows: list[_Row] = []

    def call(self, event: str | None, *, settings: str) -> Roll:
        """``event`` is what this rank is about to do; None if it has run out of inputs."""
        rows = self._rows = self._gather(event, settings)
        active = tuple(rank for rank, row in enumerate(rows) if row.active)
        if not active:
            return Roll(active=())
        first = rows[active[0]]
        self._check_same_event(rows, active)
        waiting = len(active) < len(rows)
        text = event if event is not None else first.beginning
        if waiting and first.event_length == _TOO_LONG:
            text = self._broadcast("" if event is None else event, active[0])
        marks = {row.settings_mark for row in rows if not row.active}
        differ = bool(marks - {first.settings_mark})
        return Roll(
            active=active,
            event=text,
            settings=self._broadcast(settings, active[0], first.settings_length) if differ else None,
        )

    def settings_of(self, source: int, *, settings: str) -> str | None:
        """After the last call: one rank's settings, where some rank has others."""
        row = self._rows[source]
        if all(other.settings_mark == row.settings_mark for other in self._rows):
            return None
        return self._broadcast(settings, source, row.settings_length)

    def _gather(self, event: str | None, settings: str) -> list[_Row]:
        known, words = settings.encode(), (event or "").encode()
        own = _ROW.pack(
            event is not None,
            zlib.crc32(known),
            len(known),
            zlib.crc32(words),
            len(words) if len(words) <= _BEGINNING else _TOO_LONG,
            words[:_BEGINNING],
        )
        size, here = self._communicator.world_size, self._communicator.rank
        gathered = torch.zeros(size * _ROW.size, dtype=torch.int8)
        gathered[here * _ROW.size : (here + 1) * _ROW.size] = _as_tensor(own)
        gathered = gathered.to(self._device)
        self._communicator.all_gather(gathered, [_ROW.size] * size).wait()
        found = _as_bytes(gathered)
        return [_read(found[start : start + _ROW.size]) for start in range(0, len(found), _ROW.size)]

    def _broadcast(self, text: str, source: int, length: int | None = None) -> str:
        """A text of which only the source has to know more than, perhaps, the length."""
        mine = text.encode() if self._communicator.rank == source else b""
        if length is None:
            size = _as_tensor(struct.pack("<I", len(mine))).to(self._device)
            self._communicator.broadcast(size, source).wait()
            [length] = struct.unpack("<I", _as_bytes(size))
        assert length is not None
        buffer = _as_tensor(mine if mine else bytes(length)).to(self._device)
        self._communicator.broadcast(buffer, source).wait()
        return _as_bytes(buffer).decode()

    def _check_same_event(self, rows: Sequence[_Row], active: Sequence[int]) -> None:
        first = rows[active[0]]
        for rank in active:
            if (rows[rank].event_mark, rows[rank].beginning) != (first.event_mark, first.beginning):
                raise HandshakeError(
                    f"ranks that have inputs do different things: rank {active[0]} is about to {first.beginning}, rank "
                    f"{rank} to {rows[rank].beginning}; fix: let every rank's loop make the same calls for each batch, "
                    "with the same arguments"
                )


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.int8)


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _read(row: bytes) -> _Row:
    active, settings_mark, settings_length, event_mark, event_length, beginning = _ROW.unpack(row)
    return _Row(
        active=bool(active),
        settings_mark=settings_mark,
        settings_length=settings_length,
        event_mark=event_mark,
        event_length=event_length,
        beginning=beginning.rstrip(b"\0").decode(errors="replace"),
    )

"""A channel over a store, watched: its heartbeat, its last operations, and what is told when a wait fails."""

from __future__ import annotations

from typing import Any

from shardrt.comm.control import LocalControl, StoreControl
from shardrt.flight import FlightRecorder
from shardrt.flight.heartbeat import Heartbeat
from shardrt.flight.watch import FlightWatch


def watched(control: StoreControl | LocalControl, log: Any) -> tuple[FlightRecorder | None, FlightWatch | None]:
    """The recorder and the watch of a channel; a process that is alone has nobody to wait for, and neither.

    Example:
        >>> from shardrt.comm.control import LocalControl
        >>> from shardrt.comm.watching import watched
        >>> from shardrt.log import rank_logger
        >>> watched(LocalControl(), rank_logger(0, 1))
        (None, None)
    """
    if isinstance(control, LocalControl):
        return None, None
    flight = FlightRecorder(control.rank, control.world_size)
    heartbeat = Heartbeat(control.store, flight, prefix=control.prefix)
    control.flight = flight
    return flight, FlightWatch(flight, ask=control.heard, log=log, heartbeat=heartbeat)

"""What happens when a wait fails: the error gets the other ranks' last words, and a report is written. Once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardrt.errors import CommunicationError, PeerError, ShardrtError
from shardrt.flight.heartbeat import Heartbeat
from shardrt.flight.processes import process_state
from shardrt.flight.recorder import FlightRecorder
from shardrt.flight.report import make_report, write_report
from shardrt.flight.telling import WHAT_RANKS_DID, tell_ranks

ASKING_SECONDS = 2.0
"""How long the store may take to say what was last heard of all ranks."""

Ask = Callable[[float], dict[int, dict[str, Any]]]
"""The last words of all ranks, found within so many seconds; those that are not found are left out."""


class FlightWatch:
    """One runtime's heartbeat, and what is told and written when one of its waits fails.

    Example:
        >>> from shardrt.errors import CommunicationError
        >>> from shardrt.flight import FlightRecorder
        >>> from shardrt.flight.watch import FlightWatch
        >>> from shardrt.log import rank_logger
        >>> flight = FlightRecorder(rank=0, world_size=2)
        >>> watch = FlightWatch(flight, ask=lambda seconds: {}, log=rank_logger(0, 2))
        >>> watch.tell("all_gather took longer than 3 s").splitlines()[-1]
        '  rank 1: never heard'
    """

    def __init__(
        self,
        flight: FlightRecorder,
        *,
        ask: Ask,
        log: Any,
        heartbeat: Heartbeat | None = None,
        directory: Path | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._flight = flight
        self._ask = ask
        self._log = log
        self._heartbeat = heartbeat
        self.directory = directory
        self.about = dict(about or {})
        self._lock = threading.Lock()
        self._beats: dict[int, dict[str, Any]] | None = None
        self._lines = ""
        self._failed = False
        self._elsewhere = False
        self._report: str | None = None
        flight.watched_by(self)

    def explain(self, error: BaseException) -> None:
        """Add to an error of ours what each rank did last, and note the failure. Never raises another one."""
        if not isinstance(error, (CommunicationError, PeerError)) or error.explained:
            return
        error.explained = True
        added = self.tell("")
        if error.args and isinstance(error.args[0], str):
            error.args = (error.args[0] + added, *error.args[1:])
        self.failed(error)

    def tell(self, text: str) -> str:
        """The text, and a line for each rank after it."""
        with self._lock:
            if self._beats is None:
                self._beats = self._ask_ranks()
                now = time.time()
                lines = tell_ranks(self._beats, world_size=self._flight.world_size, own=self._flight.rank, now=now)
                self._lines = WHAT_RANKS_DID + "".join(f"\n  {line}" for line in lines)
        return text + self._lines

    def failed(self, error: BaseException) -> None:
        """This rank fails with an error, its own or one that it passes on: write the report and log it, once."""
        with self._lock:
            if self._failed:
                return
            self._failed = True
        line = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._flight.failure = line
        self.tell("")  # asks what the others did last, if nobody has yet
        # What was written while this rank was elsewhere says more than that it has come back to hear of it.
        report = self._report if self._elsewhere else self._write(error)
        self._log.error("rank.failed", error=line, report=report)

    def peer_failed(self, note: Mapping[str, Any]) -> None:
        """Another rank has failed, and this one has not noticed: it is busy or stuck outside of the runtime.

        Where reports are wanted, it writes one all the same: its stacks say where it is.
        """
        rank = note.get("rank")
        if self.directory is None or self._failed or self._elsewhere or rank == self._flight.rank:
            return
        self._elsewhere = True
        told = PeerError(f"rank {self._flight.rank} was elsewhere when rank {rank} failed: {note.get('error')}")
        self._report = self._write(told, elsewhere=not self._flight.under_way)
        self._log.warning("rank.elsewhere", failed=rank, report=self._report)

    def close(self) -> None:
        """End the heartbeat."""
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def _write(self, error: BaseException, *, elsewhere: bool = False) -> str | None:
        if self.directory is None:
            return None
        try:
            peers = {rank: beat for rank, beat in (self._beats or {}).items() if rank != self._flight.rank}
            report = make_report(self._flight, error, peers=peers, about=self.about, elsewhere=elsewhere)
            return str(write_report(self.directory, report))
        except Exception as problem:  # whatever it is, the error that is being reported matters more
            self._log.warning("hang_report.unwritten", directory=str(self.directory), reason=str(problem))
            return None

    def _ask_ranks(self) -> dict[int, dict[str, Any]]:
        beats: dict[int, dict[str, Any]] = dict(self._heartbeat.heard) if self._heartbeat is not None else {}
        try:
            beats.update(self._ask(ASKING_SECONDS))
        except (RuntimeError, ShardrtError) as problem:  # the store is gone with its host
            self._log.debug("ranks.unheard", reason=str(problem))
        beats[self._flight.rank] = own = self._flight.summary()
        for rank, beat in beats.items():
            if rank != self._flight.rank and beat.get("host") == own["host"]:
                beat["process"] = process_state(beat.get("pid"))
        return beats

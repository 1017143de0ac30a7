"""Recording spans while a run goes on, from several threads, at the price of appending a tuple."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from shardrt.errors import ConfigError

LANES = ("trainer", "update", "reduce", "gather", "other")
"""Where spans are drawn, from the top: the thread that trains, local optimizer steps, and three kinds of operations."""

MOST_SPANS = 500_000
"""Spans kept by default: 200 megabytes, and thousands of steps."""

SHORTEST_WAIT = 50e-6
"""Seconds. Below this a wait is the price of asking."""

OWN_THREADS = "shardrt-"
"""How the names of our own threads begin. What they wait for keeps nobody from training."""

_LANE_OF_OPERATION = {"reduce_scatter": "reduce", "all_gather": "gather"}
_NOTHING: Mapping[str, Any] = {}

Recorded = tuple[str, str, float, float, str, Mapping[str, Any]]
"""Lane, name, start, end, name of the thread, details."""


@attrs.frozen(kw_only=True)
class Clock:
    """One moment on two clocks: ``perf_counter``, which times spans, and the wall clock, which hosts share."""

    perf: float
    wall: float

    @classmethod
    def now(cls) -> Clock:
        """This moment."""
        return cls(perf=time.perf_counter(), wall=time.time())

    def microseconds(self, perf: float) -> int:
        """A moment of ``perf_counter`` as whole microseconds since 1970.

        Example:
            >>> from shardrt.timeline.recorder import Clock
            >>> Clock(perf=10.0, wall=1000.0).microseconds(10.5)
            1000500000
        """
        # The two are added as whole numbers: a float of microseconds since 1970 has no room for more than quarters.
        return round(self.wall * 1e6) + round((perf - self.perf) * 1e6)


class Timeline:
    """The spans of one rank, which any thread may add to.

    ``about`` says what the run is (schedule, backend, partitioner) and ends up in the file. Beyond ``limit`` spans
    further ones are only counted, so that a run of days neither fills the memory nor fails.

    Example:
        >>> import pathlib, tempfile, time
        >>> from shardrt.timeline import Timeline
        >>> timeline = Timeline(rank=0, world_size=1)
        >>> started = time.perf_counter()
        >>> timeline.span("trainer", "step", started, time.perf_counter(), number=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     timeline.write(pathlib.Path(folder, "timeline-rank0.json"))
        >>> len(timeline), timeline.dropped
        (1, 0)
    """

    def __init__(
        self, rank: int, world_size: int, *, about: Mapping[str, Any] | None = None, limit: int = MOST_SPANS
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.about = dict(about or {})
        self.host = socket.gethostname()
        self.limit = limit
        self.dropped = 0
        """Spans beyond the limit."""
        self.clock = Clock.now()
        self._spans: list[Recorded] = []
        self._counting = threading.Lock()
        self._noted = threading.local()

    def __len__(self) -> int:
        return len(self._spans)

    def span(self, lane: str, name: str, started: float, ended: float, **details: Any) -> None:
        """Add a span of the calling thread; ``started`` and ended are moments of ``time.perf_counter()``."""
        self.add(lane, name, started, ended, details)

    def add(self, lane: str, name: str, started: float, ended: float, details: Mapping[str, Any]) -> None:
        """The same as :meth:`span`, with details that were collected before."""
        if lane not in LANES:
            raise ConfigError(f"unknown lane {lane!r} of a timeline; lanes: {', '.join(LANES)}")
        if len(self._spans) >= self.limit:
            with self._counting:
                self.dropped += 1
            return
        self._spans.append((lane, name, started, ended, threading.current_thread().name, details))

    def operation(self, kind: str, started: float, ended: float, details: Mapping[str, Any]) -> None:
        """Add an operation of a communicator, in the lane of its kind."""
        self.add(_LANE_OF_OPERATION.get(kind, "other"), kind, started, ended, details)

    def waited(self, target: str, started: float, ended: float) -> None:
        """The calling thread has waited for something. A wait of our own threads is not one of the trainer.

        Example:
            >>> from shardrt.timeline import Timeline
            >>> timeline = Timeline(rank=0, world_size=1)
            >>> timeline.waited("all_gather", 1.0, 1.00001)  # too short to matter
            >>> timeline.waited("all_gather", 1.0, 1.5)
            >>> [span[:4] for span in timeline.spans()]
            [('trainer', 'wait', 1.0, 1.5)]
        """
        if ended - started >= SHORTEST_WAIT:
            own = threading.current_thread().name.startswith(OWN_THREADS)
            self.add("update" if own else "trainer", "wait", started, ended, {"target": target})

    @contextmanager
    def noting(self, **details: Any) -> Iterator[None]:
        """Operations that the calling thread issues inside this block carry these details, such as ``bucket=3``.

        Example:
            >>> from shardrt.timeline import Timeline
            >>> timeline = Timeline(rank=0, world_size=1)
            >>> with timeline.noting(bucket=3):
            ...     print(timeline.noted())
            {'bucket': 3}
            >>> timeline.noted()
            {}
        """
        before = self.noted()
        self._noted.details = {**before, **details}
        try:
            yield
        finally:
            self._noted.details = before

    def noted(self) -> Mapping[str, Any]:
        """What :meth:`noting` has set for the calling thread."""
        return getattr(self._noted, "details", _NOTHING)

    def spans(self) -> list[Recorded]:
        """A copy of what has been recorded so far."""
        return list(self._spans)

    def write(self, path: str | Path) -> None:
        """Write what has been recorded so far as Chrome trace-event JSON; see :mod:`shardrt.timeline.chrome`."""
        from shardrt.timeline.chrome import write_chrome  # it imports this module

        write_chrome(self, Path(path))

"""Saving and consolidating optimizer state through shardrt, beside torch's own ways, in one run.

Ranks are started once, with one thread each. In every round each *holder* of the state in turn (torch's ZeRO, DTensors,
shardrt) makes its own optimizer over the same transformer, fills the state by a real step of AdamW, does what it does
under the clock and is dropped again; each round starts with another. The clock runs from a barrier until the slowest
rank is done. Before each, everything that waits to be written to the disk is written, so that nobody pays for another.
Ratios are medians of the rounds' ratios, since absolute times mean little, those of disks least of all.
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from shardrt.bench.interrupts import terminating_in_order
from shardrt.errors import ConfigError
from shardrt.launch import OnEvent, launch_ranks

TORCH_ZERO, DCP, SAVE, CONSOLIDATE, BEHIND = "torch_zero", "dcp", "save", "consolidate", "behind"
DCP_LOAD, LOAD = "dcp_load", "load"

WAYS: Mapping[str, str] = MappingProxyType(
    {
        TORCH_ZERO: "torch ZeRO + torch.save",
        DCP: "torch DCP, save",
        SAVE: "rt.save",
        CONSOLIDATE: "full_state_dict + torch.save",
        BEHIND: "rt.save, asynchronous",
        DCP_LOAD: "torch DCP, load",
        LOAD: "rt.load",
    }
)
"""Name to how tables call it."""
DURABLE = frozenset({DCP, SAVE, BEHIND})
"""Those whose files are synchronised with the disk when they return or are committed; torch.save leaves that open."""
HOLDERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"zero": (TORCH_ZERO,), "dtensors": (DCP, DCP_LOAD), "shardrt": (SAVE, LOAD, CONSOLIDATE, BEHIND)}
)
"""Who holds the state, and what is measured on it, in order."""
RATIOS = ((SAVE, TORCH_ZERO), (SAVE, DCP), (CONSOLIDATE, TORCH_ZERO), (LOAD, DCP_LOAD))
LAYERS = 8
PLAIN_STEPS = 4
"""Steps without a save, which those beside one are compared to."""
_BYTES_OF_STATE = 8
"""Per parameter: two numbers in single precision."""
_PER_WIDTH_SQUARED = 12
"""Parameters of a block of the transformer, in times of its width squared."""
_WIDTH_STEP = 8
_ROOM = 3
"""Free space on the disk, in times of the state: a file is there beside the one that replaces it."""


@attrs.frozen(kw_only=True)
class StateSettings:
    """What to measure, in a form that travels to the ranks as JSON.

    Example:
        >>> from shardrt.bench.state import StateSettings
        >>> StateSettings(state_gb=1).width
        1144
        >>> StateSettings(ranks=1)
        Traceback (most recent call last):
        shardrt.errors.ConfigError: ranks must be a whole number from 2 up, got 1: alone nothing is spread
    """

    ranks: int = 4
    state_gb: float = 1.0
    rounds: int = 3

    def __attrs_post_init__(self) -> None:
        if type(self.ranks) is not int or self.ranks < 2:
            raise ConfigError(f"ranks must be a whole number from 2 up, got {self.ranks!r}: alone nothing is spread")
        if type(self.rounds) is not int or self.rounds < 1:
            raise ConfigError(f"rounds must be a whole number from 1 up, got {self.rounds!r}")
        if not 1e-3 <= self.state_gb <= 1e3:
            raise ConfigError(f"state_gb must be from 0.001 to 1000 gigabytes, got {self.state_gb!r}")

    @property
    def width(self) -> int:
        """Of a transformer that has about this much AdamW state."""
        exact = math.sqrt(self.state_gb * 1e9 / _BYTES_OF_STATE / (_PER_WIDTH_SQUARED * LAYERS))
        return max(round(exact / _WIDTH_STEP), 1) * _WIDTH_STEP

    @property
    def turns(self) -> int:
        """How many measurements a rank reports."""
        return self.rounds * len(WAYS)

    def in_turn(self, number: int) -> list[str]:
        """The holders, starting with another one in each round."""
        names = list(HOLDERS)
        first = number % len(names)
        return names[first:] + names[:first]

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return attrs.asdict(self)


@attrs.frozen(kw_only=True)
class WayResult:
    """One way, over all rounds and ranks."""

    name: str
    seconds_by_round: Sequence[float]
    """Of the slowest rank. Of an asynchronous save: how much training lost in all."""
    peaks: Sequence[float] | None
    """For each rank, the most bytes it held above what it had before, in any round; None where the system hides it."""
    file_bytes: int
    more: Mapping[str, float] = attrs.field(factory=dict)
    """What only this way has."""

    @property
    def label(self) -> str:
        """What tables call it."""
        return WAYS[self.name]

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.seconds_by_round)

    def times(self, other: WayResult) -> float:
        """How many times the other's time it takes: the median of the rounds' ratios."""
        pairs = zip(self.seconds_by_round, other.seconds_by_round, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {
            "name": self.name,
            "label": self.label,
            "seconds": self.seconds,
            "seconds_by_round": list(self.seconds_by_round),
            "peak_bytes_largest": None if self.peaks is None else max(self.peaks),
            "peak_bytes_mean": None if self.peaks is None else statistics.mean(self.peaks),
            "file_bytes": self.file_bytes,
            "durable": self.name in DURABLE,
            **self.more,
        }


@attrs.frozen(kw_only=True)
class StateReport:
    """All ways, in the order of :data:`WAYS`."""

    settings: StateSettings
    results: tuple[WayResult, ...]
    parameters: int
    state_bytes: int
    """Over all ranks."""
    torch: str
    directory: str
    seconds: float

    def __getitem__(self, name: str) -> WayResult:
        return next(result for result in self.results if result.name == name)

    @property
    def time_ratios(self) -> dict[str, float]:
        """Ours by theirs."""
        return {f"{ours}/{theirs}": self[ours].times(self[theirs]) for ours, theirs in RATIOS}

    @property
    def memory_ratios(self) -> dict[str, float | None]:
        """Ours by theirs, on the rank that needs most."""
        found: dict[str, float | None] = {}
        for ours, theirs in RATIOS:
            mine, other = self[ours].peaks, self[theirs].peaks
            found[f"{ours}/{theirs}"] = None if not mine or not other or not max(other) else max(mine) / max(other)
        return found

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {
            **self.settings.to_json(),
            "torch": self.torch,
            "backend": "gloo",
            "threads_per_rank": 1,
            "directory": self.directory,
            "parameters": self.parameters,
            "state_bytes": self.state_bytes,
            "memory": "VmHWM above VmRSS before, largest of the rounds",
            "ways": [result.to_json() for result in self.results],
            "time_ratios": self.time_ratios,
            "memory_ratios": self.memory_ratios,
            "seconds": self.seconds,
        }


def combine(name: str, by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> WayResult:
    """One way's measurements, by rank and round, as one result.

    Example:
        >>> from shardrt.bench.state import combine
        >>> run = {"peak": 8, "file_bytes": 5, "more": {}}
        >>> found = combine("save", [[{**run, "seconds": 0.5}], [{**run, "seconds": 0.75, "peak": 9}]])
        >>> found.seconds, found.peaks
        (0.75, [8, 9])
    """
    rounds = list(zip(*by_rank, strict=True))
    peaks = [[run["peak"] for run in runs] for runs in by_rank]
    told = [runs[0]["more"] for runs in rounds]
    return WayResult(
        name=name,
        seconds_by_round=[max(run["seconds"] for run in runs) for runs in rounds],
        peaks=None if any(peak is None for rank in peaks for peak in rank) else [max(rank) for rank in peaks],
        file_bytes=max(run["file_bytes"] for runs in rounds for run in runs),
        more={key: statistics.median(one[key] for one in told) for key in told[0]},
    )


def measure_state(
    settings: StateSettings,
    *,
    directory: Path | None = None,
    on_event: OnEvent | None = None,
    patience: float = 600.0,
) -> StateReport:
    """Start the ranks, let them measure, and put together what they bring home.

    Files are written to a new directory inside ``directory``, by default where the process is, and removed. An event
    names the ``way`` and counts what is ``done`` out of ``settings.turns``.
    """
    started = time.monotonic()
    above = Path.cwd() if directory is None else directory.resolve()
    _check_room(above, settings)
    with (
        terminating_in_order(),
        tempfile.TemporaryDirectory(prefix=".shardrt-bench-", dir=above, ignore_cleanup_errors=True) as folder,
    ):
        answers = launch_ranks(
            "shardrt.bench.state_rank",
            {"settings": settings.to_json(), "directory": folder},
            ranks=settings.ranks,
            on_event=on_event,
            patience=patience,
        )
    return StateReport(
        settings=settings,
        results=tuple(combine(name, [answer["runs"][name] for answer in answers]) for name in WAYS),
        parameters=answers[0]["parameters"],
        state_bytes=sum(answer["state_bytes"] for answer in answers),
        torch=answers[0]["torch"],
        directory=str(above),
        seconds=time.monotonic() - started,
    )


def _check_room(directory: Path, settings: StateSettings) -> None:
    if not directory.is_dir():
        raise ConfigError(
            f"there is no directory {str(directory)!r} to write to; make it, or choose another with --dir"
        )
    free = shutil.disk_usage(directory).free
    if free < _ROOM * settings.state_gb * 1e9:
        raise ConfigError(
            f"{str(directory)!r} has {free / 1e9:.1f} GB free, and {_ROOM * settings.state_gb:g} GB are needed; choose "
            "another directory with --dir, or less state"
        )

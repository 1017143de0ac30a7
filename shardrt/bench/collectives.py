"""The collectives of every backend beside torch's own over Gloo, and beside a plain copy in memory.

For each number of ranks a group is started once, with one thread per rank. In every round each operation of each size
is done by every contestant in turn, and each round starts with another contestant, so that noise of the machine meets
all alike. A contestant does the operation once to warm up, then a few times in a row under the clock, each waited for
before the next; the time of the slowest rank counts. Ratios are medians of the rounds' ratios. When all rounds are
done, every contestant does every operation once more, with numbers whose sums are exact, and the results are checked.

Where a communicator offers ``allocate`` (memory that its peers can read), it is measured in such buffers too: "in
place". Backends that cannot take part are named with the reason.

Note [What must cross]: two hosts share the ranks evenly. However many ranks each has, half of the buffer must cross in
either direction for a reduce-scatter (each host sends at least its own sums of what the other one's ranks own) and for
an all-gather; an all-reduce is both; a broadcast sends the buffer one way. Both directions run at once. Adding in rank
order, which gives the same bits for any partition, rules out sums on the way: with several ranks on each host a
backend that does so cannot reach this limit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import attrs

from shardrt.bench.link import EmulatedLink, bits_per_second
from shardrt.bench.overlap import NO_LINK
from shardrt.errors import ConfigError
from shardrt.launch import OnEvent, launch_ranks
from shardrt.registry import load_registry
from shardrt.registry.nearness import did_you_mean
from shardrt.registry.probing import probe

CROSSING: Mapping[str, float] = MappingProxyType(
    {"reduce_scatter": 0.5, "all_gather": 0.5, "all_reduce": 1.0, "broadcast": 1.0}
)
"""The operations, and the share of the buffer that must cross between two hosts. See Note [What must cross]."""
TORCH = "torch"
COPY = "copy"
LABELS: Mapping[str, str] = MappingProxyType({TORCH: "torch, Gloo", COPY: "a copy in memory"})
"""What the backends are compared to."""
IN_PLACE = ", in place"
DEVICE_TYPE = "cpu"
_ITEM_SIZE = 4
_TIMED_MEGABYTES = 50
_MOST_REPEATS = 20


def _tuple(given: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(given)  # they travel to the ranks as a list


@attrs.frozen(kw_only=True)
class CollectivesSettings:
    """What to measure.

    Example:
        >>> from shardrt.bench.collectives import CollectivesSettings
        >>> settings = CollectivesSettings(ranks=[2], megabytes=[1, 25], operations=["broadcast"])
        >>> settings.all_runs, list(settings.cases())
        (10, [('broadcast', 1), ('broadcast', 25)])
        >>> CollectivesSettings(operations=["gather"])
        Traceback (most recent call last):
        shardrt.errors.ConfigError: unknown operation 'gather'; there are: reduce_scatter, all_gather, ...
    """

    ranks: tuple[int, ...] = attrs.field(default=(2, 4), converter=_tuple)
    megabytes: tuple[float, ...] = attrs.field(default=(1.0, 25.0, 100.0), converter=_tuple)
    """Sizes of the whole buffer, of which each rank owns an even part."""
    operations: tuple[str, ...] = attrs.field(default=tuple(CROSSING), converter=_tuple)
    backends: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    """Nothing is every one that ``auto`` may take."""
    rounds: int = 5
    link: str = NO_LINK
    """A rate: the ranks are on two hosts with this between them."""

    def __attrs_post_init__(self) -> None:
        for ranks in self.ranks:
            if type(ranks) is not int or ranks < 2:
                raise ConfigError(f"ranks must be whole numbers from 2 up, got {ranks!r}: alone there are no peers")
        for size in self.megabytes:
            if isinstance(size, bool) or not isinstance(size, (int, float)) or not 0.001 <= size <= 10_000:
                raise ConfigError(f"megabytes must be from 0.001 to 10000, got {size!r}")
        if type(self.rounds) is not int or self.rounds < 1:
            raise ConfigError(f"rounds must be a whole number from 1 up, got {self.rounds!r}")
        for name in self.operations:
            if name not in CROSSING:
                raise ConfigError(
                    f"unknown operation {name!r}; there are: {', '.join(CROSSING)}{did_you_mean(name, CROSSING)}"
                )
        if not (self.ranks and self.megabytes and self.operations):
            raise ConfigError("nothing to measure: give at least one number of ranks, one size and one operation")
        if self.link != NO_LINK:
            bits_per_second(self.link)
            if odd := [ranks for ranks in self.ranks if ranks % 2]:
                raise ConfigError(
                    f"a link joins 2 hosts that share the ranks evenly, got {odd[0]} ranks; use an even number, or "
                    f"link={NO_LINK!r}"
                )
        for name in self.backends:  # before ranks are started, which would each find out for themselves
            load_registry().backends.get(DEVICE_TYPE, name)

    def cases(self) -> Iterator[tuple[str, float]]:
        """Each operation with each size."""
        return ((operation, size) for operation in self.operations for size in self.megabytes)

    @property
    def all_runs(self) -> int:
        """How often all contestants do an operation of one size."""
        return len(self.ranks) * self.rounds * len(self.operations) * len(self.megabytes)

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return attrs.asdict(self)


def elements(megabytes: float, ranks: int) -> int:
    """How many float32 numbers a buffer of about this size has: a multiple of the ranks, as torch wants it.

    Example:
        >>> from shardrt.bench.collectives import elements
        >>> elements(1, 2), elements(1, 3)
        (250000, 250002)
    """
    return -(-round(megabytes * 1e6 / _ITEM_SIZE) // ranks) * ranks


def repeats(megabytes: float) -> int:
    """How many operations are timed in a row, so that small ones take long enough to tell.

    Example:
        >>> from shardrt.bench.collectives import repeats
        >>> repeats(1), repeats(25), repeats(100)
        (20, 2, 1)
    """
    return max(1, min(_MOST_REPEATS, round(_TIMED_MEGABYTES / megabytes)))


def taking_part(ranks: int, asked_for: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    """The backends that can be measured with so many ranks, and why the others cannot.

    Example:
        >>> from shardrt.bench.collectives import taking_part
        >>> names, missing = taking_part(2)
        >>> "gloo" in names, missing["null"]
        (True, 'takes no more than 1 rank')
    """
    names: list[str] = []
    missing: dict[str, str] = {}
    for entry in load_registry().backends:
        record = entry.record
        smallest, largest = record.world_sizes
        if asked_for and record.name not in asked_for:
            continue
        if record.device_type not in ("*", DEVICE_TYPE):
            missing[f"{record.name} ({record.device_type})"] = f"for {record.device_type}; measured is the CPU"
        elif record.priority <= 0 and not asked_for:
            missing[record.name] = f"only taken by name: --backend {record.name}"
        elif ranks < smallest or (largest is not None and ranks > largest):
            limits = f"at least {smallest}" if largest is None else f"no more than {largest}"
            missing[record.name] = f"takes {limits} rank{'s' if (largest or smallest) > 1 else ''}"
        elif not (answer := probe(record)).ok:
            missing[record.name] = answer.reason + (f"; fix: {answer.fix}" if answer.fix else "")
        else:
            names.append(record.name)
    return sorted(names), missing


@attrs.frozen(kw_only=True)
class CollectiveResult:
    """One contestant with one operation, size and number of ranks."""

    ranks: int
    operation: str
    megabytes: float
    name: str
    label: str
    """What tables call it."""
    round_seconds: tuple[float, ...]
    """For each round, the time of one operation, on the slowest rank."""
    is_right: bool
    """Whether all ranks got the right numbers."""

    @property
    def case(self) -> tuple[int, str, float]:
        """What it is compared within."""
        return self.ranks, self.operation, self.megabytes

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.round_seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between these two is the middle half of the rounds."""
        if len(self.round_seconds) == 1:
            return self.seconds, self.seconds
        low, _, high = statistics.quantiles(self.round_seconds, n=4, method="inclusive")
        return low, high

    def times(self, other: CollectiveResult) -> float:
        """How many times the other's time it takes: the median of the rounds' ratios."""
        pairs = zip(self.round_seconds, other.round_seconds, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


@attrs.frozen(kw_only=True)
class CollectivesReport:
    """All contestants, and those that could not take part."""

    settings: CollectivesSettings
    results: tuple[CollectiveResult, ...]
    missing: Mapping[int, Mapping[str, str]]
    """By the number of ranks: who was not there, and why."""
    torch: str
    seconds: float

    @property
    def all_right(self) -> bool:
        """Whether every contestant got the right numbers on every rank."""
        return all(result.is_right for result in self.results)

    def beside(self, result: CollectiveResult, name: str) -> float:
        """The time of a result in times of another contestant's, such as ``torch``, in the same case."""
        other = next(one for one in self.results if one.name == name and one.case == result.case)
        return result.times(other)

    def wire_seconds(self, operation: str, megabytes: float, ranks: int) -> float | None:
        """How long what must cross takes on the link, both ways at once; None without one.

        See Note [What must cross].
        """
        if self.settings.link == NO_LINK:
            return None
        crossing = CROSSING[operation] * _ITEM_SIZE * elements(megabytes, ranks)
        return 8 * crossing / bits_per_second(self.settings.link)

    def times_wire(self, result: CollectiveResult) -> float | None:
        """The time of a result in times of the wire's limit; None without a link and for what does not use it."""
        wire = self.wire_seconds(result.operation, result.megabytes, result.ranks)
        return None if wire is None or result.name == COPY else result.seconds / wire

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {
            **self.settings.to_json(),
            "torch": self.torch,
            "threads_per_rank": 1,
            "dtype": "float32",
            "missing": {str(ranks): dict(reasons) for ranks, reasons in self.missing.items()},
            "all_right": self.all_right,
            "results": [self._row(result) for result in self.results],
            "seconds": self.seconds,
        }

    def _row(self, result: CollectiveResult) -> dict[str, Any]:
        wire = self.wire_seconds(result.operation, result.megabytes, result.ranks)
        return {
            "ranks": result.ranks,
            "operation": result.operation,
            "megabytes": result.megabytes,
            "name": result.name,
            "label": result.label,
            "ms": 1e3 * result.seconds,
            "ms_quartiles": [1e3 * seconds for seconds in result.quartiles],
            "ms_by_round": [1e3 * seconds for seconds in result.round_seconds],
            "times_torch": self.beside(result, TORCH),
            "times_copy": self.beside(result, COPY),
            "wire_limit_ms": None if wire is None else 1e3 * wire,
            "times_wire_limit": self.times_wire(result),
            "right": result.is_right,
        }


def measure_collectives(
    settings: CollectivesSettings, *, on_event: OnEvent | None = None, patience: float = 120.0
) -> CollectivesReport:
    """Start the ranks, group after group, let them measure, and put together what they bring home.

    ``on_event`` and ``patience`` are those of :func:`shardrt.launch.launch_ranks`; an event says what is ``doing``, and
    counts how many runs are ``done`` out of ``settings.all_runs``.
    """
    started = time.monotonic()
    results: list[CollectiveResult] = []
    missing: dict[int, dict[str, str]] = {}
    answers: list[Any] = []
    with ExitStack() as cleanup:
        hosts = () if settings.link == NO_LINK else cleanup.enter_context(EmulatedLink(settings.link)).hosts
        for index, ranks in enumerate(settings.ranks):
            names, missing[ranks] = taking_part(ranks, settings.backends)
            answers = launch_ranks(
                "shardrt.bench.collectives_rank",
                {
                    "settings": settings.to_json(),
                    "backends": names,
                    "done": index * settings.all_runs // len(settings.ranks),
                },
                ranks=ranks,
                on_event=on_event,
                patience=patience,
                hosts=hosts,
            )
            missing[ranks] |= answers[0]["missing"]
            results += combine(answers)
    return CollectivesReport(
        settings=settings,
        results=tuple(results),
        missing=missing,
        torch=answers[0]["torch"],
        seconds=time.monotonic() - started,
    )


def combine(answers: Sequence[Mapping[str, Any]]) -> Iterator[CollectiveResult]:
    """What all ranks measured, as results: a rank that is late makes all late."""
    for rows in zip(*(answer["results"] for answer in answers), strict=True):
        first = rows[0]
        yield CollectiveResult(
            ranks=len(answers),
            **{field: first[field] for field in ("operation", "megabytes", "name", "label")},
            round_seconds=tuple(map(max, zip(*(row["round_seconds"] for row in rows), strict=True))),
            is_right=all(row["is_right"] for row in rows),
        )

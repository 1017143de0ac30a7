"""The backend ``metered``: runs ``gloo`` and tells, when it is closed, how long each operation took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from shardrt import Availability, BackendRecord, Group, hookimpl, load_registry
from shardrt.errors import PluginError
from shardrt.protocols import Communicator, ReduceOp, Work

if TYPE_CHECKING:
    from torch import Tensor

SHARDRT_HOOK_VERSION = "1.0"


@hookimpl
def shardrt_backends() -> Iterator[BackendRecord]:
    """Offer ``metered`` for the CPU, to those who ask for it: ``auto`` never takes priority 0."""
    yield BackendRecord(
        name="metered",
        device_type="cpu",
        summary="gloo, and a log of how long its operations took",
        factory=lambda group: MeteredCommunicator(group, wrapped().factory(group)),
        probe=probe,
        process_group="gloo",
        priority=0,
    )


def wrapped() -> BackendRecord:
    """The backend that does the work, as anyone finds it: by device type and name."""
    return load_registry().backends.get("cpu", "gloo")


def probe() -> Availability:
    """It runs where gloo does."""
    try:
        return wrapped().probe()
    except PluginError as error:
        return Availability.no(str(error), fix="install gloo's plugin, or allow it in SHARDRT_PLUGINS")


@attrs.define
class Latency:
    """How often an operation ran and how long it took, from its call to the end of its wait.

    Example:
        >>> from shardrt_stripes.metered import Latency
        >>> latency = Latency()
        >>> latency.add(0.5), latency.add(0.25)
        (None, None)
        >>> latency
        Latency(operations=2, seconds=0.75, longest=0.5)
    """

    operations: int = 0
    seconds: float = 0.0
    longest: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one operation."""
        self.operations += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)


class MeteredWork:
    """An operation of gloo's, whose first completed wait stops the clock."""

    def __init__(self, work: Work, latency: Latency) -> None:
        self._work = work
        self._latency = latency
        self._started: float | None = time.perf_counter()

    def wait(self) -> None:
        """See :class:`shardrt.protocols.Work`."""
        self._work.wait()
        if self._started is not None:
            self._latency.add(time.perf_counter() - self._started)
            self._started = None


class MeteredCommunicator:
    """Passes every call on and notes how long it took; ``latencies`` has the sums, by operation."""

    name = "metered"

    def __init__(self, group: Group, inner: Communicator) -> None:
        from shardrt.log import rank_logger  # here, because listing plugins should import as little as possible

        self.rank = inner.rank
        self.world_size = inner.world_size
        self.capabilities = inner.capabilities
        self.traffic = inner.traffic
        self.latencies: dict[str, Latency] = {}
        self._inner = inner
        self._log = rank_logger(group.rank, group.world_size)

    def reduce_scatter(
        self, buffer: Tensor, splits: Sequence[int], *, output: Tensor | None = None, average: bool = False
    ) -> Work:
        """See :class:`shardrt.protocols.Communicator`, as for all that follow."""
        return self._metered(
            "reduce_scatter", self._inner.reduce_scatter(buffer, splits, output=output, average=average)
        )

    def all_gather(self, buffer: Tensor, splits: Sequence[int]) -> Work:
        return self._metered("all_gather", self._inner.all_gather(buffer, splits))

    def all_reduce(self, buffer: Tensor, *, op: ReduceOp = "sum", average: bool = False) -> Work:
        return self._metered("all_reduce", self._inner.all_reduce(buffer, op=op, average=average))

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        return self._metered("all_to_all", self._inner.all_to_all(received, sent))

    def broadcast(self, buffer: Tensor, source: int) -> Work:
        return self._metered("broadcast", self._inner.broadcast(buffer, source))

    def barrier(self) -> None:
        started = time.perf_counter()
        self._inner.barrier()
        self._latency("barrier").add(time.perf_counter() - started)

    def exchange(self, topic: str, value: Any) -> list[Any]:
        return self._inner.exchange(topic, value)

    def close(self) -> None:
        self._inner.close()
        while self.latencies:
            operation, latency = self.latencies.popitem()
            self._log.info("metered.latency", operation=operation, **attrs.asdict(latency))

    def _metered(self, operation: str, work: Work) -> Work:
        return MeteredWork(work, self._latency(operation))

    def _latency(self, operation: str) -> Latency:
        return self.latencies.setdefault(operation, Latency())

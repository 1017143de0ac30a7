"""A communicator over the collectives of a torch process group, for backends that do as torch.distributed does."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from shardrt.comm.carriers import dtype_name
from shardrt.comm.checks import check_all_to_all, check_flat, check_reduction, check_runs, check_source
from shardrt.comm.scratch import ScratchPool
from shardrt.comm.traffic import Traffic
from shardrt.comm.works import FinishedWork, FollowedWork
from shardrt.errors import CapabilityError, CommunicationError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from shardrt.comm.capabilities import Capabilities
    from shardrt.flight import FlightRecorder, Operation
    from shardrt.protocols import Group, ReduceOp, Work
    from shardrt.timeline import Timeline


class CollectiveCommunicator:
    """Flat buffers over single-tensor collectives, in place and asynchronous.

    Single-tensor collectives take even runs only, so ``capabilities`` must say ``uneven=False`` for reduce_scatter and
    all_gather; :func:`~shardrt.comm.negotiate` pads the rest. What the capabilities do not declare is refused.
    ``ops`` has torch.distributed's functions; a test hands in a double. ``pack_all_to_all`` is for backends whose
    all_to_all of lists wants even pieces while the single-tensor one takes sizes.

    Example:
        >>> import torch
        >>> from shardrt import Group
        >>> from shardrt.comm import Capabilities, CollectiveCommunicator, OpSupport
        >>> from shardrt.comm.control import LocalControl
        >>> alone = Group(rank=0, world_size=1, device_type="cpu", timeout=60.0, control=LocalControl())
        >>> even = OpSupport(uneven=False)
        >>> comm = CollectiveCommunicator(alone, capabilities=Capabilities(reduce_scatter=even, all_gather=even))
        >>> comm.reduce_scatter(torch.ones(3), [3]).wait()
    """

    def __init__(
        self,
        group: Group,
        *,
        capabilities: Capabilities,
        ops: Any = None,
        name: str = "collective",
        pack_all_to_all: bool = False,
    ) -> None:
        for operation in ("reduce_scatter", "all_gather"):
            support = getattr(capabilities, operation)
            if support is not None and support.uneven:
                raise ConfigError(
                    f"capabilities of {name!r} say that {operation} takes uneven runs, which torch's single-tensor "
                    "collectives do not; declare OpSupport(uneven=False) and let negotiate() pad"
                )
        if group.process_group is None and group.world_size != 1:
            raise ConfigError(f"backend {name!r} needs a process group for {group.world_size} ranks, got none")
        if ops is None:
            import torch.distributed as ops
        self.name = name
        self.rank = group.rank
        self.world_size = group.world_size
        self.capabilities = capabilities
        self.traffic = Traffic()
        self._group = group
        self._ops = ops
        self._pack = pack_all_to_all
        self._issued = 0
        self._scratch = ScratchPool()
        # Named so since torch 2.13, which warns at the older names; a vendor's fork of torch may have only those.
        self._reduce_scatter = getattr(ops, "reduce_scatter_single", None) or ops.reduce_scatter_tensor
        self._all_gather = getattr(ops, "all_gather_single", None) or ops.all_gather_into_tensor

    def reduce_scatter(
        self, buffer: Tensor, splits: Sequence[int], *, output: Tensor | None = None, average: bool = False
    ) -> Work:
        """See :class:`shardrt.protocols.Communicator`; without an output, the own run is it, in place."""
        self._check("reduce_scatter", buffer)
        run = self._own_run("reduce_scatter", buffer, splits, output)
        op = self._reduce_op("reduce_scatter", buffer, "sum", average=average)
        if output is not None:
            if self._group.process_group is None:
                output.copy_(run)
            run = output
        share = self._others_share(buffer)
        issue = partial(self._reduce_scatter, run, buffer, op=op, **self._to)
        return self._start("reduce_scatter", share, share, issue if buffer.numel() else None)

    def all_gather(self, buffer: Tensor, splits: Sequence[int]) -> Work:
        """See :class:`shardrt.protocols.Communicator`; the own run is the input, in place."""
        self._check("all_gather", buffer)
        run = self._own_run("all_gather", buffer, splits)
        share = self._others_share(buffer)
        issue = partial(self._all_gather, buffer, run, **self._to)
        return self._start("all_gather", share, share, issue if buffer.numel() else None)

    def all_reduce(self, buffer: Tensor, *, op: ReduceOp = "sum", average: bool = False) -> Work:
        """See :class:`shardrt.protocols.Communicator`."""
        self._check("all_reduce", buffer)
        torch_op = self._reduce_op("all_reduce", buffer, op, average=average)
        share = 2 * self._others_share(buffer)
        issue = partial(self._ops.all_reduce, buffer, op=torch_op, **self._to)
        return self._start("all_reduce", share, share, issue if buffer.numel() else None)

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        """See :class:`shardrt.protocols.Communicator`."""
        check_all_to_all(received, sent, self.world_size, self.rank)
        self._check("all_to_all", sent[0])
        out = sum(piece.nbytes for rank, piece in enumerate(sent) if rank != self.rank)
        into = sum(piece.nbytes for rank, piece in enumerate(received) if rank != self.rank)
        if self._group.process_group is None:
            received[0].copy_(sent[0])
            return self._start("all_to_all", out, into, None)
        if self._pack:
            return self._all_to_all_packed(received, sent, out, into)
        return self._start(
            "all_to_all", out, into, partial(self._ops.all_to_all, list(received), list(sent), **self._to)
        )

    def broadcast(self, buffer: Tensor, source: int) -> Work:
        """See :class:`shardrt.protocols.Communicator`."""
        self._check("broadcast", buffer)
        check_source("broadcast", source, self.world_size, self.rank)
        others = buffer.nbytes if self.world_size > 1 else 0
        out, into = (others, 0) if source == self.rank else (0, others)
        issue = partial(self._ops.broadcast, buffer, group_src=source, **self._to)
        return self._start("broadcast", out, into, issue if buffer.numel() else None)

    def barrier(self) -> None:
        """See :class:`shardrt.protocols.Communicator`; through the control channel, which names who is missing."""
        self._group.control.exchange("barrier", None)

    def exchange(self, topic: str, value: Any) -> list[Any]:
        """See :class:`shardrt.protocols.Communicator`."""
        return self._group.control.exchange(topic, value)

    def close(self) -> None:
        """Nothing is held beside the process group, which is whoever made it's."""

    @property
    def _to(self) -> dict[str, Any]:
        return {"group": self._group.process_group, "async_op": True}

    def _all_to_all_packed(self, received: Sequence[Tensor], sent: Sequence[Tensor], out: int, into: int) -> Work:
        sizes_out, sizes_in = [piece.numel() for piece in sent], [piece.numel() for piece in received]
        outgoing = self._scratch.take(sum(sizes_out), sent[0].dtype, sent[0].device)
        incoming = self._scratch.take(sum(sizes_in), sent[0].dtype, sent[0].device)
        for cell, piece in zip(outgoing.tensor.split_with_sizes(sizes_out), sent, strict=True):
            cell.copy_(piece)

        def unpack() -> None:
            for cell, piece in zip(incoming.tensor.split_with_sizes(sizes_in), received, strict=True):
                piece.copy_(cell)

        work = self._start(
            "all_to_all",
            out,
            into,
            partial(self._ops.all_to_all_single, incoming.tensor, outgoing.tensor, sizes_in, sizes_out, **self._to),
        )
        return FollowedWork([work], then=unpack, leases=[outgoing, incoming])

    def _start(self, operation: str, sent: int, received: int, issue: Callable[[], Any] | None) -> Work:
        self.traffic.count(operation, sent=sent, received=received)
        if issue is None or self._group.process_group is None:
            return FinishedWork()
        # Where streams order the work, waiting with a time-out would block the host until the device is done and so
        # end all overlap; the process group's own watchdog keeps the time there.
        limit = None if self.capabilities.needs_streams else self._group.timeout
        where = f"rank {self.rank} of {self.world_size}, backend {self.name!r}, timeout {self._group.timeout:g} s"
        timeline = self._group.timeline
        span = None
        if timeline is not None:
            details = {"sent": sent, "communicator": self._group.number, **timeline.noted()}
            span = _Span(timeline, time.perf_counter(), details)
        record = None
        if self._group.flight is not None:
            self._issued += 1
            flight, number = self._group.flight, self._issued
            issued = flight.issue(operation, communicator=self._group.number, number=number, nbytes=max(sent, received))
            issued.start()
            record = _Recorded(flight, issued)
        try:
            handle = issue()
        except (RuntimeError, ValueError) as error:
            failure = _failed(operation, where, error)
            if record is not None:
                record.end(failure)
            raise failure from error
        return _HandleWork(handle, operation, where, limit, span, record)

    def _check(self, operation: str, buffer: Tensor) -> None:
        support = getattr(self.capabilities, operation)
        name = dtype_name(buffer.dtype)
        if support is None or not support.takes(name, world_size=self.world_size):
            raise CapabilityError(
                f"backend {self.name!r} does not declare {operation} of {name} with {self.world_size} ranks; "
                "use the communicator that negotiate() returns, which has a fallback or says that there is none"
            )
        check_flat(operation, buffer, self.rank)

    def _own_run(self, operation: str, buffer: Tensor, splits: Sequence[int], output: Tensor | None = None) -> Tensor:
        check_runs(operation, buffer, splits, self.world_size, self.rank, output=output)
        each = splits[0]
        if any(numel != each for numel in splits):
            raise CapabilityError(
                f"backend {self.name!r} takes even runs only: {operation} got splits {list(splits)} for "
                f"{buffer.numel()} elements; use the communicator that negotiate() returns, which pads"
            )
        return buffer.narrow(0, self.rank * each, each)

    def _others_share(self, buffer: Tensor) -> int:
        return buffer.nbytes * (self.world_size - 1) // self.world_size

    def _reduce_op(self, operation: str, buffer: Tensor, op: ReduceOp, *, average: bool) -> Any:
        check_reduction(operation, buffer, op, average, self.rank)
        if average and not self.capabilities.average:
            raise CapabilityError(
                f"backend {self.name!r} does not declare averages; use the communicator that negotiate() returns"
            )
        return getattr(self._ops.ReduceOp, "AVG" if average else op.upper())


@attrs.frozen
class _Span:
    """An operation as the host sees it: from its start to the end of the wait for it. The device may be done before."""

    timeline: Timeline
    started: float
    details: Mapping[str, Any]

    def end(self, operation: str, waited_from: float) -> None:
        ended = time.perf_counter()
        self.timeline.waited(operation, waited_from, ended)
        self.timeline.operation(operation, self.started, ended, self.details)


@attrs.frozen
class _Recorded:
    """An operation among the last ones of this rank, as the host sees it."""

    flight: FlightRecorder
    operation: Operation

    def end(self, error: CommunicationError | None) -> None:
        self.operation.finish(error)
        if error is not None:
            self.flight.explain(error)


class _HandleWork:
    """One asynchronous operation of torch's. Waits once: some backends block for ever when asked again."""

    def __init__(
        self,
        handle: Any,
        operation: str,
        where: str,
        limit: float | None,
        span: _Span | None,
        record: _Recorded | None,
    ) -> None:
        self._handle = handle
        self._operation = operation
        self._where = where
        self._limit = limit
        self._span = span
        self._record = record
        self._failure: CommunicationError | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            handle, self._handle = self._handle, None
            if handle is None:
                return
            waited_from = 0.0 if self._span is None else time.perf_counter()
            try:
                if self._limit is None:
                    handle.wait()
                else:
                    handle.wait(datetime.timedelta(seconds=self._limit))
            except (RuntimeError, ValueError) as error:
                self._failure = _failed(self._operation, self._where, error)
                raise self._failure from error
            finally:
                if self._span is not None:
                    self._span.end(self._operation, waited_from)
                if self._record is not None:
                    self._record.end(self._failure)


def _failed(operation: str, where: str, error: Exception) -> CommunicationError:
    return CommunicationError(
        f"{operation} failed ({where}): {error}; the first rank to fail has the cause: see the others' output, and "
        "whether every rank makes the same calls in the same order"
    )

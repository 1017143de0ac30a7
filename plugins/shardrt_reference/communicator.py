"""Every operation gathers everyone's whole input and computes the answer by definition, reductions in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shardrt.comm import Capabilities, Traffic
from shardrt.comm.checks import check_all_to_all, check_flat, check_reduction, check_runs, check_source
from shardrt.errors import CommunicationError
from shardrt_reference.gathering import Gatherer, run_of

if TYPE_CHECKING:
    from torch import Tensor

    from shardrt.protocols import Group, ReduceOp


class SettledWork:
    """An operation that ran while it was issued; what went wrong is told to whoever waits."""

    def __init__(self, error: CommunicationError | None = None) -> None:
        self._error = error

    def wait(self) -> None:
        """Return at once, or raise what went wrong."""
        if self._error is not None:
            raise self._error


class ReferenceCommunicator:
    """The oracle: correct before anything else.

    Example:
        >>> import torch
        >>> from shardrt import Group
        >>> from shardrt.comm.control import LocalControl
        >>> from shardrt_reference.communicator import ReferenceCommunicator
        >>> group = Group(rank=0, world_size=1, device_type="cpu", timeout=1.0, control=LocalControl())
        >>> buffer = torch.arange(3.0)
        >>> ReferenceCommunicator(group).reduce_scatter(buffer, [3], average=True).wait()
        >>> buffer.tolist()
        [0.0, 1.0, 2.0]
    """

    name = "reference"

    def __init__(self, group: Group) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self.capabilities = Capabilities()
        self.traffic = Traffic()
        self._control = group.control
        self._flight = group.flight
        self._number = group.number
        self._issued = 0
        self._gatherer = Gatherer(group, self.traffic)

    def reduce_scatter(
        self, buffer: Tensor, splits: Sequence[int], *, output: Tensor | None = None, average: bool = False
    ) -> SettledWork:
        """Gather all buffers, add up this rank's run of each."""
        check_runs("reduce_scatter", buffer, splits, self.world_size, self.rank, output=output)
        check_reduction("reduce_scatter", buffer, "sum", average, self.rank)

        def compute() -> None:
            inputs = self._gatherer.gather("reduce_scatter", buffer)
            result = run_of(buffer, splits, self.rank) if output is None else output
            result.detach().copy_(_reduce([run_of(one, splits, self.rank) for one in inputs], "sum", average))

        return self._settle("reduce_scatter", buffer.nbytes, compute)

    def all_gather(self, buffer: Tensor, splits: Sequence[int]) -> SettledWork:
        """Gather all buffers, take each run from its owner's."""
        check_runs("all_gather", buffer, splits, self.world_size, self.rank)

        def compute() -> None:
            for owner, one in enumerate(self._gatherer.gather("all_gather", buffer)):
                run_of(buffer.detach(), splits, owner).copy_(run_of(one, splits, owner))

        return self._settle("all_gather", buffer.nbytes, compute)

    def all_reduce(self, buffer: Tensor, *, op: ReduceOp = "sum", average: bool = False) -> SettledWork:
        """Gather all buffers and reduce them in rank order."""
        check_flat("all_reduce", buffer, self.rank)
        check_reduction("all_reduce", buffer, op, average, self.rank)

        def compute() -> None:
            buffer.detach().copy_(_reduce(self._gatherer.gather("all_reduce", buffer), op, average))

        return self._settle("all_reduce", buffer.nbytes, compute)

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> SettledWork:
        """Gather everything that anyone sends, pick what is meant for this rank."""
        check_all_to_all(received, sent, self.world_size, self.rank)

        def compute() -> None:
            for place, one in zip(received, self._gatherer.gather_addressed("all_to_all", received, sent), strict=True):
                place.detach().copy_(one)

        return self._settle("all_to_all", sum(one.nbytes for one in sent), compute)

    def broadcast(self, buffer: Tensor, source: int) -> SettledWork:
        """Gather all buffers, keep the source's."""
        check_flat("broadcast", buffer, self.rank)
        check_source("broadcast", source, self.world_size, self.rank)

        def compute() -> None:
            buffer.detach().copy_(self._gatherer.gather("broadcast", buffer)[source])

        return self._settle("broadcast", buffer.nbytes, compute)

    def barrier(self) -> None:
        """Nobody has everyone's headers before everyone has called."""
        self._settle("barrier", 0, lambda: self._gatherer.gather_headers("barrier")).wait()

    def exchange(self, topic: str, value: Any) -> list[Any]:
        """Through the group's control channel."""
        return self._control.exchange(topic, value)

    def close(self) -> None:
        """The process group belongs to whoever made it, and there is nothing else."""

    def _settle(self, operation: str, nbytes: int, compute: Callable[[], None]) -> SettledWork:
        record, failure = None, None
        if self._flight is not None:
            self._issued += 1
            record = self._flight.issue(operation, communicator=self._number, number=self._issued, nbytes=nbytes)
            record.start()
        try:
            compute()
        except CommunicationError as error:
            failure = error
        if record is not None:
            record.finish(failure)
            if failure is not None and self._flight is not None:
                self._flight.explain(failure)
        return SettledWork(failure)


def _reduce(inputs: Sequence[Tensor], op: ReduceOp, average: bool) -> Tensor:
    import torch

    steps: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "sum": torch.add,
        "max": torch.maximum,
        "min": torch.minimum,
    }
    result = inputs[0]
    for one in inputs[1:]:
        result = steps[op](result, one)
    return result / len(inputs) if average else result

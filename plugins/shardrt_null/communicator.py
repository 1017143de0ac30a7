"""Collectives over one rank: each is the identity, and each is checked as strictly as where it matters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardrt.comm import Capabilities, Traffic
from shardrt.comm.checks import check_all_to_all, check_flat, check_reduction, check_runs, check_source
from shardrt.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from shardrt.protocols import Group, ReduceOp


class FinishedWork:
    """An operation that was done when it was issued."""

    def wait(self) -> None:
        """Return at once."""


class NullCommunicator:
    """The communicator of a group of one.

    Example:
        >>> import torch
        >>> from shardrt import Group
        >>> from shardrt.comm.control import LocalControl
        >>> from shardrt_null.communicator import NullCommunicator
        >>> group = Group(rank=0, world_size=1, device_type="cpu", timeout=1.0, control=LocalControl())
        >>> communicator = NullCommunicator(group)
        >>> buffer = torch.arange(3.0)
        >>> communicator.all_reduce(buffer, average=True).wait()
        >>> buffer.tolist(), communicator.traffic.sent
        ([0.0, 1.0, 2.0], 0)
    """

    name = "null"
    rank = 0
    world_size = 1

    def __init__(self, group: Group) -> None:
        if group.world_size != 1:
            raise ConfigError(
                f"backend 'null' serves one rank, this group has {group.world_size}; "
                f"choose backend='auto' or one that can reach the others"
            )
        self.capabilities = Capabilities(concurrent=True)
        self.traffic = Traffic()
        self._control = group.control

    def reduce_scatter(
        self, buffer: Tensor, splits: Sequence[int], *, output: Tensor | None = None, average: bool = False
    ) -> FinishedWork:
        """The only run holds its own sum already."""
        check_runs("reduce_scatter", buffer, splits, 1, 0, output=output)
        check_reduction("reduce_scatter", buffer, "sum", average, 0)
        if output is not None:
            output.detach().copy_(buffer.detach())
        return self._done("reduce_scatter")

    def all_gather(self, buffer: Tensor, splits: Sequence[int]) -> FinishedWork:
        """The only run is there already."""
        check_runs("all_gather", buffer, splits, 1, 0)
        return self._done("all_gather")

    def all_reduce(self, buffer: Tensor, *, op: ReduceOp = "sum", average: bool = False) -> FinishedWork:
        """The reduction over one rank is what it has."""
        check_flat("all_reduce", buffer, 0)
        check_reduction("all_reduce", buffer, op, average, 0)
        return self._done("all_reduce")

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> FinishedWork:
        """Copy what the rank sends itself."""
        check_all_to_all(received, sent, 1, 0)
        received[0].detach().copy_(sent[0].detach())
        return self._done("all_to_all")

    def broadcast(self, buffer: Tensor, source: int) -> FinishedWork:
        """The only possible source has it already."""
        check_flat("broadcast", buffer, 0)
        check_source("broadcast", source, 1, 0)
        return self._done("broadcast")

    def barrier(self) -> None:
        """Everybody is here."""
        self._done("barrier")

    def exchange(self, topic: str, value: Any) -> list[Any]:
        """The value as others would see it."""
        return self._control.exchange(topic, value)

    def close(self) -> None:
        """There is nothing to give back."""

    def _done(self, operation: str) -> FinishedWork:
        self.traffic.count(operation, sent=0, received=0)
        return FinishedWork()

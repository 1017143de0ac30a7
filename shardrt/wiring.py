"""The communicators that a runtime opens: one for everything, and more for operations with an order of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from shardrt.choosing import Chosen
from shardrt.comm.membership import end_group
from shardrt.comm.negotiate import negotiate
from shardrt.flight import FlightRecorder
from shardrt.opening import Subgroups, with_opening
from shardrt.protocols import Communicator, ControlChannel, Group
from shardrt.registry import Registry
from shardrt.timeline import Timeline

_COMMUNICATORS = 4096
"""Numbers that one runtime's communicators have before those of the next begin."""


class WiringCalls:
    """The part of :class:`shardrt.Runtime` that opens communicators."""

    rank: int
    world_size: int
    device_type: str
    timeout: float
    registry: Registry
    timeline: Timeline | None
    flight: FlightRecorder | None
    _chosen: Chosen
    _control: ControlChannel
    _process_group: Any
    _communicator: Communicator
    _negotiated: dict[tuple[str, ...], Communicator]
    _opened: list[Communicator]
    _subgroups: Subgroups
    log: Any

    def negotiate(self, dtypes: Iterable[str]) -> Communicator:
        """A communicator that carries these dtypes, with fallbacks where the backend needs them."""
        if self.world_size == 1:
            return self._communicator
        travelling = _travelling(dtypes)
        if travelling not in self._negotiated:
            self._negotiated[travelling] = negotiate(self._communicator, dtypes=travelling)
        return self._negotiated[travelling]

    def open_communicator(self, dtypes: Iterable[str]) -> Communicator | None:
        """A communicator for operations with an order of their own: one optimizer's, or one kind of its operations.

        None where the backend runs one communicator at a time.
        """
        if self._communicator.capabilities.concurrent:
            before = len(self._opened)
            made = self._make_communicator()
            if len(self._opened) > before:
                return negotiate(made, dtypes=_travelling(dtypes))
        return None

    def open_among(self, groups: Sequence[Sequence[int]], dtypes: Iterable[str]) -> Communicator:
        """A communicator of the group that this rank is in, for operations with an order of their own."""
        group = next(list(one) for one in groups if self.rank in one)
        control = self._control.among(groups)
        process_group = None
        if self._process_group is not None and len(group) > 1:
            process_group = self._subgroups.of(self._process_group, groups, timeout=self.timeout)
        about = self._group(group.index(self.rank), len(group), control, process_group)
        if len(group) == 1:
            made = self.registry.backends.get(self.device_type, "null").factory(about)
        else:
            made = self._chosen.make_communicator(about)
        self._opened.append(made)
        return made if len(group) == 1 else negotiate(made, dtypes=_travelling(dtypes))

    def _end_subgroups(self) -> None:
        if dist.is_available() and dist.is_initialized() and self._process_group is dist.group.WORLD:
            for group in self._subgroups.drain():
                end_group(group, rank=self.rank, log=self.log)
        self._subgroups.drain()

    def _make_communicator(self) -> Communicator:
        about = self._group(self.rank, self.world_size, self._control, self._process_group)
        made = self._chosen.make_communicator(about)
        if made not in self._opened:
            self._opened.append(made)
        return made

    def _group(self, rank: int, world_size: int, control: ControlChannel, process_group: Any) -> Group:
        about = Group(
            rank=rank,
            world_size=world_size,
            device_type=self.device_type,
            timeout=self.timeout,
            control=control,
            process_group=process_group,
            number=self._control.number * _COMMUNICATORS + len(self._opened),
            timeline=self.timeline,
            flight=self.flight,
        )
        return with_opening(about, self.registry, self._subgroups)


def _travelling(dtypes: Iterable[str]) -> tuple[str, ...]:
    """Besides the parameters, single bytes (which gradients there are) and norms travel."""
    return tuple(sorted({*dtypes, "int8", "float32"}))

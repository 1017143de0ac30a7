"""A communicator on a worker rank, ready to be checked: values, answers by definition, and what may be asked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from shardrt.comm.control import LocalControl, StoreControl
from shardrt.errors import CapabilityError
from shardrt.opening import Subgroups, with_opening
from shardrt.protocols import Communicator, ControlChannel, Group
from shardrt.registry import load_registry
from shardrt.testing.functions import resolve
from shardrt.testing.rendezvous import rank_store

if TYPE_CHECKING:
    from torch import Tensor


@attrs.define
class Bench:
    """What a check works with on one rank."""

    comm: Communicator
    direct: bool
    """Whether ``comm`` is the backend's own, so that its declared limits count, or a negotiated one that has none."""
    was_negotiated: bool
    """Whether negotiation had to add fallbacks."""
    device_type: str
    timeout: float
    declared: list[str] = attrs.field(factory=list)

    @property
    def rank(self) -> int:
        """This rank in the group under test."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """Ranks in the group under test."""
        return self.comm.world_size

    def can(self, operation: str, dtype: str, *, splits: Sequence[int] = (), average: bool = False) -> bool:
        """Whether this must work; what the backend declares it cannot do is noted instead."""
        if not self.direct:
            return True
        capabilities = self.comm.capabilities
        support = getattr(capabilities, operation)
        if support is None:
            return self._declare(operation)
        if self.world_size in support.world_sizes_refused:
            return self._declare(f"{operation} on {self.world_size} ranks")
        if not support.takes(dtype, world_size=self.world_size):
            return self._declare(f"{operation} of {dtype}")
        if len(set(splits)) > 1 and not support.uneven:
            return self._declare(f"{operation} with uneven runs")
        if average and not capabilities.average:
            return self._declare("average")
        return True

    def values(self, rank: int, count: int, dtype: str, salt: int = 0) -> Tensor:
        """What a rank brings: small whole numbers, so that sums over a few ranks are exact in every dtype."""
        import torch

        numbers = (torch.arange(count) * 7 + rank * 5 + salt * 3) % 13 - (0 if dtype == "uint8" else 6)
        kind = getattr(torch, dtype)
        if kind.is_complex:
            return torch.complex(numbers.double(), (numbers * 2 + rank).double()).to(kind)
        return numbers.to(kind)

    def mine(self, count: int, dtype: str, salt: int = 0) -> Tensor:
        """What this rank brings, on the device under test."""
        return self.values(self.rank, count, dtype, salt).to(self.device_type)

    def total(self, count: int, dtype: str, salt: int = 0, *, average: bool = False) -> Tensor:
        """The sum or average over all ranks, by definition."""
        result = self.values(0, count, dtype, salt)
        for rank in range(1, self.world_size):
            result = result + self.values(rank, count, dtype, salt)
        return result / self.world_size if average else result

    def splits(self, kind: str) -> list[int]:
        """Sizes of runs: ``even``, ``uneven``, ``empty`` (some without elements) or ``none`` (all without)."""
        return {
            "even": [4] * self.world_size,
            "uneven": [3 + 5 * rank for rank in range(self.world_size)],
            "empty": [0 if rank % 2 == 0 else 6 for rank in range(self.world_size)],
            "last": [0] * (self.world_size - 1) + [7],
            "none": [0] * self.world_size,
        }[kind]

    def run_of(self, splits: Sequence[int], rank: int) -> slice:
        """Where a rank's run lies in the buffer."""
        start = sum(splits[:rank])
        return slice(start, start + splits[rank])

    def _declare(self, what: str) -> bool:
        self.declared.append(what)
        return False


def expect(condition: bool, message: str) -> None:
    """Fail with a message; workers have no rewritten assertions that would show values."""
    if not condition:
        raise AssertionError(message)


def expect_same(found: Tensor, expected: Tensor, what: str, *, exact: bool = True) -> None:
    """Compare bit for bit, or within the rounding of one division."""
    import torch

    found = found.detach().cpu()
    tolerances = {"rtol": 0.0, "atol": 0.0} if exact else {}
    torch.testing.assert_close(found, expected, **tolerances, msg=lambda text: f"{what}: {text}")  # type: ignore[arg-type]


@contextmanager
def bench(kit: str, *, via: str, dtypes: Sequence[str], timeout: float, members: Sequence[int] = ()) -> Iterator[Bench]:
    """Make the communicator of a conformance class on this rank, over all ranks or over some of them."""
    import torch.distributed as dist

    case: Any = resolve(kit)
    world = list(members) or list(range(int(os.environ["WORLD_SIZE"])))
    rank = world.index(int(os.environ["RANK"]))
    process_group = None
    if case.process_group is not None:
        process_group = dist.new_group(world) if members else dist.group.WORLD
    group = Group(
        rank=rank,
        world_size=len(world),
        device_type=case.device_type,
        timeout=timeout,
        control=_control(rank, len(world), timeout, process_group),
        process_group=process_group,
    )
    own = case.make(with_opening(group, load_registry(), Subgroups()))
    try:
        comm = own if via == "direct" else _negotiated(own, dtypes)
        yield Bench(
            comm=comm,
            direct=via == "direct",
            was_negotiated=comm is not own,
            device_type=case.device_type,
            timeout=timeout,
        )
    finally:
        own.close()


def run_check(
    kit: str,
    check: str,
    via: str,
    dtypes: Sequence[str] = ("float32", "float64", "int64"),
    wait_limit: float = 20.0,
    members: Sequence[int] = (),
    **arguments: Any,
) -> list[str]:
    """Run one check on this rank; what the backend declares unsupported comes back, everything else must hold."""
    import torch.distributed as dist

    if members and int(os.environ["RANK"]) not in members:
        dist.new_group(list(members))  # every rank of the world takes part in making a group
        return []
    try:
        with bench(kit, via=via, dtypes=dtypes, timeout=wait_limit, members=members) as made:
            # Where nothing had to be negotiated it is the same communicator, and the direct check has just run.
            if made.direct or made.was_negotiated:
                resolve(check)(made, **arguments)
            return made.declared
    except Refused as refusal:
        return [f"negotiation refuses {', '.join(dtypes)}: {refusal}"]


_MEETING_SECONDS = 20.0
"""How long ranks have to find one another on a busy machine, however little a check lets them wait afterwards."""


class Refused(Exception):
    """Negotiation said that there is no fallback: allowed, as long as it says so before anything runs."""


def _negotiated(own: Communicator, dtypes: Sequence[str]) -> Communicator:
    from shardrt.comm import negotiate

    try:
        return negotiate(own, dtypes=list(dtypes))
    except CapabilityError as error:
        raise Refused(str(error)) from error


def _control(rank: int, world_size: int, timeout: float, process_group: Any) -> ControlChannel:
    if world_size == 1:
        return LocalControl()
    store = rank_store() if process_group is None else process_group.get_group_store()
    made = StoreControl(store, rank=rank, world_size=world_size, timeout=max(timeout, _MEETING_SECONDS))
    made.timeout = timeout
    return made

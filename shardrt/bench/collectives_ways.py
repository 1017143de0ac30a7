"""Who takes part in ``shardrt bench collectives``, and how each does an operation. See
:mod:`shardrt.bench.collectives`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

import attrs
import torch
import torch.distributed as dist

from shardrt.bench.collectives import COPY, DEVICE_TYPE, IN_PLACE, LABELS, TORCH
from shardrt.errors import ShardrtError
from shardrt.runtime import Runtime

if TYPE_CHECKING:
    from shardrt.protocols import Communicator

_SOURCE = 0
"""The rank that broadcasts."""
_ROUGH = 997
"""Numbers to check with repeat after so many, which no size of a run is a multiple of: misplaced runs show."""

Made = TypeVar("Made")

Operate = Callable[[str, torch.Tensor, torch.Tensor], None]
"""Does an operation on a buffer, to its end. The reduced run of a reduce-scatter goes to the second tensor."""


@attrs.frozen(kw_only=True, eq=False)
class Way:
    """A contestant, and the buffer it works in."""

    name: str
    label: str
    operate: Operate
    buffer: torch.Tensor
    output: torch.Tensor

    def run(self, operation: str, numel: int) -> Callable[[], None]:
        """One operation on the first elements of the buffer."""
        buffer, output = self.parts(numel)
        return functools.partial(self.operate, operation, buffer, output)

    def parts(self, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffer and the output of an operation of so many elements."""
        share = numel if self.name == COPY else numel // dist.get_world_size()
        return self.buffer[:numel], self.output[:share]


@attrs.define(kw_only=True)
class Ways:
    """All contestants of this rank's group. What is put on the stack is closed when they are done."""

    cleanup: ExitStack
    largest: int
    """Elements of the largest buffer."""
    open_backend: Callable[[str, ExitStack], Communicator] = attrs.field(factory=lambda: _open)
    there: list[Way] = attrs.field(factory=list)
    missing: dict[str, str] = attrs.field(factory=dict)

    def add_all(self, backends: Sequence[str]) -> None:
        """Torch and the copy, then every backend, which all ranks add or none does."""
        # Written to, not only zeroed: pages that nobody has written to are all the same one, and fast to read.
        buffer = torch.empty(self.largest).zero_()
        scratch = torch.empty_like(buffer).zero_()
        output = torch.empty(self.largest // dist.get_world_size()).zero_()
        self.there += [
            Way(name=TORCH, label=LABELS[TORCH], operate=_with_torch, buffer=buffer, output=output),
            Way(name=COPY, label=LABELS[COPY], operate=_copy, buffer=buffer, output=scratch),
        ]
        for name in backends:
            communicator = self._together(name, functools.partial(self.open_backend, name, self.cleanup))
            if communicator is None:
                continue
            ours = functools.partial(_with_ours, communicator)
            self.there.append(Way(name=name, label=name, operate=ours, buffer=buffer, output=output))
            allocate = getattr(communicator, "allocate", None)
            if allocate is None:
                continue
            shared = self._together(name + IN_PLACE, functools.partial(allocate, self.largest, torch.float32))
            if shared is not None:
                label = name + IN_PLACE
                self.there.append(Way(name=label, label=label, operate=ours, buffer=shared.zero_(), output=output))

    def _together(self, name: str, make: Callable[[], Made | None]) -> Made | None:
        """What every rank could make; None if one of them could not, which is told."""
        made: Made | None = None
        told = ""
        try:
            made = make()
            told = "" if made is not None else "there is no room for the buffer"
        except ShardrtError as error:
            told = str(error).partition("\n")[0]
        flag = torch.tensor([made is not None], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        if not flag.item():
            self.missing[name] = told or "another rank could not take part with it"
            return None
        return made


def _open(name: str, cleanup: ExitStack) -> Communicator:
    return cleanup.enter_context(Runtime(backend=name, device=DEVICE_TYPE)).negotiate(["float32"])


def is_right(way: Way, operation: str, numel: int) -> bool:
    """Whether the operation does what it should, with numbers whose sums are exact."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    buffer, output = way.parts(numel)
    base = torch.arange(numel, dtype=torch.int64).remainder_(_ROUGH).float()
    own = slice(rank * (numel // ranks), (rank + 1) * (numel // ranks))
    total = base * ranks + sum(range(ranks))
    owners = torch.arange(ranks, dtype=torch.float32).repeat_interleave(numel // ranks)
    if operation == "all_gather":
        buffer.fill_(-1.0)
        buffer[own] = base[own] + rank
    else:
        torch.add(base, rank, out=buffer)
    if way.name == COPY:
        expected, found = buffer.clone(), output
    elif operation == "reduce_scatter":
        expected, found = total[own], output
    else:
        expected, found = (
            {"all_gather": base + owners, "all_reduce": total, "broadcast": base + _SOURCE}[operation],
            buffer,
        )
    way.run(operation, numel)()
    right = torch.equal(found, expected)
    buffer.zero_()
    return right


def _with_ours(communicator: Communicator, operation: str, buffer: torch.Tensor, output: torch.Tensor) -> None:
    splits = [output.numel()] * communicator.world_size
    if operation == "reduce_scatter":
        communicator.reduce_scatter(buffer, splits, output=output).wait()
    elif operation == "all_gather":
        communicator.all_gather(buffer, splits).wait()
    elif operation == "all_reduce":
        communicator.all_reduce(buffer).wait()
    else:
        communicator.broadcast(buffer, _SOURCE).wait()


def _with_torch(operation: str, buffer: torch.Tensor, output: torch.Tensor) -> None:
    if operation == "reduce_scatter":
        dist.reduce_scatter_single(output, buffer)
    elif operation == "all_gather":
        start = dist.get_rank() * output.numel()
        dist.all_gather_single(buffer, buffer[start : start + output.numel()])
    elif operation == "all_reduce":
        dist.all_reduce(buffer)
    else:
        dist.broadcast(buffer, _SOURCE)


def _copy(operation: str, buffer: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(buffer)

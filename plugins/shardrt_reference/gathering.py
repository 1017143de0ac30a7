"""Everyone's bytes on every rank, whatever their dtype, with a header that catches ranks doing different things.

Bytes travel as uint8, padded to the longest, so that dtypes the process group does not know travel too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from shardrt.errors import CommunicationError
from shardrt.plan import ITEM_SIZES

if TYPE_CHECKING:
    from torch import Tensor

    from shardrt.comm import Traffic
    from shardrt.protocols import Group

_OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce", "all_to_all", "broadcast", "barrier")
_DTYPES = tuple(ITEM_SIZES)


class Gatherer:
    """Gathers over one process group, counting what it sends."""

    def __init__(self, group: Group, traffic: Traffic) -> None:
        self._group = group
        self._traffic = traffic

    def gather(self, operation: str, buffer: Tensor) -> list[Tensor]:
        """Every rank's buffer, on the CPU; all must have one length and one dtype."""
        data = _to_bytes(buffer)
        self._start_count()
        headers = self._exchange_headers(operation, _dtype_name(buffer), [data.numel()])
        lengths = [header[0] for header in headers]
        if len(set(lengths)) > 1:
            raise CommunicationError(
                f"{operation}: ranks bring buffers of different sizes, bytes by rank: {lengths}; "
                f"every rank must pass a buffer of the same size and dtype"
            )
        parts = self._all_gather(operation, data)
        self._finish_count(operation)
        return [part.view(buffer.dtype) for part in parts]

    def gather_addressed(self, operation: str, received: Sequence[Tensor], sent: Sequence[Tensor]) -> list[Tensor]:
        """What every rank has for this one, in rank order."""
        import torch

        me = self._group.rank
        data = [_to_bytes(tensor) for tensor in sent]
        self._start_count()
        sizes = self._exchange_headers(operation, _dtype_name(sent[me]), [one.numel() for one in data])
        mine = [row[me] for row in sizes]
        expected = [tensor.numel() * tensor.element_size() for tensor in received]
        longest = max(sum(row) for row in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: sum(sizes[me])] = torch.cat(data)
        parts = self._all_gather(operation, padded)
        self._finish_count(operation)
        if mine != expected:
            raise CommunicationError(
                f"{operation} on rank {me}: sizes do not match pairwise: ranks send it {mine} bytes, "
                f"it has room for {expected}"
            )
        found = [run_of(part, row, me) for part, row in zip(parts, sizes, strict=True)]
        return [one.clone().view(tensor.dtype) for one, tensor in zip(found, received, strict=True)]

    def gather_headers(self, operation: str) -> None:
        """Only find out that everyone is here, for the same thing."""
        self._start_count()
        self._exchange_headers(operation, "uint8", [])
        self._finish_count(operation)

    def _exchange_headers(self, operation: str, dtype: str, sizes: Sequence[int]) -> list[list[int]]:
        import torch

        dtype_code = _DTYPES.index(dtype)
        fill = [0] * (self._group.world_size - len(sizes))
        header = torch.tensor([_OPERATIONS.index(operation), dtype_code, *sizes, *fill], dtype=torch.int64)
        found = [part.view(torch.int64).tolist() for part in self._all_gather(operation, header.view(torch.uint8))]
        doing = [_OPERATIONS[row[0]] for row in found]
        if len(set(doing)) > 1 or len({row[1] for row in found}) > 1:
            detail = f"operations by rank: {doing}; dtypes by rank: {[_DTYPES[row[1]] for row in found]}"
            raise CommunicationError(
                f"{operation} on rank {self._group.rank}: ranks do not make the same call, {detail}; "
                f"every rank must make the same calls in the same order"
            )
        return [row[2:] for row in found]

    def _all_gather(self, operation: str, data: Tensor) -> list[Tensor]:
        import torch
        import torch.distributed as dist

        others = self._group.world_size - 1
        if others == 0:
            return [data.clone()]
        parts = [torch.empty_like(data) for _ in range(self._group.world_size)]
        if data.numel() == 0:
            return parts
        started = time.monotonic()
        try:
            work = dist.all_gather(parts, data, group=self._group.process_group, async_op=True)
            work.wait(timedelta(seconds=self._group.timeout))
        except RuntimeError as error:
            raise CommunicationError(
                f"{operation} failed on rank {self._group.rank} of {self._group.world_size} after "
                f"{time.monotonic() - started:.1f} s (timeout {self._group.timeout:g} s): {error}; "
                f"see whether another rank ended, is stuck, or does not make this call"
            ) from error
        self._sent += data.numel() * others
        return parts

    def _start_count(self) -> None:
        self._sent = 0

    def _finish_count(self, operation: str) -> None:
        # As many bytes come in as go out: every rank sends the same padded length.
        self._traffic.count(operation, sent=self._sent, received=self._sent)


def run_of(tensor: Tensor, sizes: Sequence[int], index: int) -> Tensor:
    """The view of one of several runs that lie one after the other.

    Example:
        >>> import torch
        >>> from shardrt_reference.gathering import run_of
        >>> run_of(torch.arange(5), [2, 3], 1).tolist()
        [2, 3, 4]
    """
    start = sum(sizes[:index])
    return tensor[start : start + sizes[index]]


def _to_bytes(buffer: Tensor) -> Tensor:
    import torch

    return buffer.detach().resolve_conj().cpu().view(torch.uint8)


def _dtype_name(buffer: Tensor) -> str:
    return str(buffer.dtype).removeprefix("torch.")

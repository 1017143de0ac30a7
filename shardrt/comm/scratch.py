"""Scratch buffers that stay between steps: the same steps ask for the same sizes, so only the first allocates."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import torch

if TYPE_CHECKING:
    from torch import Tensor


@attrs.define(eq=False)
class Lease:
    """One piece of scratch, for one operation under way.

    Example:
        >>> import torch
        >>> from shardrt.comm.scratch import ScratchPool
        >>> lease = ScratchPool().take(4, torch.int32, torch.device("cpu"))
        >>> lease.tensor.shape
        torch.Size([4])
    """

    tensor: Tensor
    """Exactly as many elements as were asked for; what is in them is undefined."""
    _whole: Tensor
    _pool: ScratchPool

    def release(self) -> None:
        """Give it back. An operation that failed keeps its lease: something may still be writing there."""
        self._pool.put_back(self._whole)


class ScratchPool:
    """Hands out scratch and keeps what comes back. Two leases never overlap until the first is released.

    The smallest free buffer that is large enough is taken. If none is, the smallest free one makes way for a larger
    one, so that the pool holds as many buffers as were ever out at once, not one for each size.

    Example:
        >>> import torch
        >>> from shardrt.comm.scratch import ScratchPool
        >>> pool = ScratchPool()
        >>> first = pool.take(8, torch.float32, torch.device("cpu"))
        >>> first.release()
        >>> second = pool.take(5, torch.float32, torch.device("cpu"))
        >>> second.tensor.data_ptr() == first.tensor.data_ptr(), pool.allocations
        (True, 1)
    """

    def __init__(self, allocate: Callable[[int, torch.dtype], Tensor | None] | None = None) -> None:
        """``allocate`` may offer better memory of the CPU than any: see :class:`shardrt.protocols.SharedAllocator`."""
        self._allocate = allocate
        self._free: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        self._lock = threading.Lock()
        self.allocations = 0
        """How often memory was asked for; stands still once every size has been seen."""

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Lease:
        """A piece of at least this size that nobody else holds."""
        with self._lock:
            free = self._free.setdefault((device, dtype), [])
            at = next((i for i, buffer in enumerate(free) if buffer.numel() >= numel), None)
            if at is not None:
                whole = free.pop(at)
            else:
                if free:
                    free.pop(0)
                offered = None if self._allocate is None else self._allocate(numel, dtype)
                whole = torch.empty(numel, dtype=dtype, device=device) if offered is None else offered
                self.allocations += 1
        return Lease(whole.narrow(0, 0, numel), whole, self)

    def put_back(self, whole: Tensor) -> None:
        """Called by :meth:`Lease.release`."""
        with self._lock:
            free = self._free.setdefault((whole.device, whole.dtype), [])
            free.append(whole)
            free.sort(key=torch.Tensor.numel)

    def clear(self) -> None:
        """Forget what is free."""
        with self._lock:
            self._free.clear()

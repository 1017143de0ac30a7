"""Runs that can be shown side by side, without a copy: see :class:`shardrt.protocols.RunViewer`."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def allocate_run(
    allocate: Callable[[int, torch.dtype], torch.Tensor | None], count: int, dtype: torch.dtype, start: int
) -> torch.Tensor | None:
    """Shared memory for the run that begins at ``start`` among those of all ranks; None where there is none.

    What is shown is pages of memory, so a run begins as far into a page as it will where it is shown.

    Example:
        >>> import torch
        >>> from shardrt.comm.viewed import allocate_run
        >>> run = allocate_run(lambda count, dtype: torch.zeros(count, dtype=dtype), 10, torch.float32, 3)
        >>> run.numel(), run.storage_offset()
        (10, 3)
    """
    lead = start * dtype.itemsize % mmap.PAGESIZE // dtype.itemsize
    memory = allocate(lead + count, dtype)
    return None if memory is None else memory[lead:]

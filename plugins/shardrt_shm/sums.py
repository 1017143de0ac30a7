"""Sums of several ranks' runs.

Note [Rank order]: sums are formed in rank order, 0 + 1 + 2 ..., whoever owns the run, and half-precision runs are
summed in float32 and rounded once. So the bits depend neither on the partition nor on the backend: gloo's are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_HALF = (torch.float16, torch.bfloat16)
_JOINS: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class Summing:
    """Reduces runs; keeps the scratch it needs for it.

    Example:
        >>> import torch
        >>> from shardrt_shm.sums import Summing
        >>> total = torch.zeros(2)
        >>> Summing().combine([torch.ones(2), torch.full((2,), 3.0)], total, "sum", divide_by=2)
        >>> total
        tensor([2., 2.])
    """

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, torch.Tensor] = {}

    def combine(self, runs: Sequence[torch.Tensor], result: torch.Tensor, op: str, *, divide_by: int = 1) -> None:
        """The reduction of the runs, in their order. One of them may be the result itself."""
        is_wider = result.dtype in _HALF and op == "sum"
        if len(runs) == 1:
            if runs[0].data_ptr() != result.data_ptr():
                result.copy_(runs[0])
        elif is_wider:
            total = self._scratch(torch.float32, result.numel())
            total.copy_(runs[0])
            for run in runs[1:]:
                total.add_(run)
            if divide_by > 1:
                total.div_(divide_by)
            result.copy_(total)
            return
        else:
            join = _JOINS[op]
            # Until it has been read, a run that is the result itself must not be written.
            at = next((index for index, run in enumerate(runs) if run.data_ptr() == result.data_ptr()), 0)
            total = runs[0]
            for index, run in enumerate(runs[1:], start=1):
                into = result if index >= at else self._scratch(result.dtype, result.numel())
                join(total, run, out=into)
                total = into
        if divide_by > 1:
            result.div_(divide_by)

    def _scratch(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        kept = self._kept.get(dtype)
        if kept is None or kept.numel() < numel:
            kept = self._kept[dtype] = torch.empty(numel, dtype=dtype)
        return kept[:numel]

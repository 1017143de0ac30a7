"""Adding up what has arrived. See Note [Rank order].

Note [Rank order]: sums are formed in rank order, 0 + 1 + 2 ..., whoever owns the run. So the result does not depend
on the partition, and with two ranks it has the bits of any other order. Half-precision runs are summed in float32 and
rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardrt.protocols import ReduceOp

_HALF = (torch.float16, torch.bfloat16)
_JOINS: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def in_float32(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Whether a reduction is done in float32 and rounded once.

    Example:
        >>> import torch
        >>> from shardrt_gloo.sums import in_float32
        >>> in_float32(torch.bfloat16, "sum"), in_float32(torch.bfloat16, "max"), in_float32(torch.float64, "sum")
        (True, False, False)
    """
    return dtype in _HALF and op == "sum"


class Sums:
    """Reduces one rank's own part with those that came from its peers; keeps the scratch that this needs.

    Example:
        >>> import torch
        >>> from shardrt_gloo.sums import Sums
        >>> result = torch.empty(2)
        >>> Sums(rank=1).combine([torch.tensor([1.0, 2.0])], torch.tensor([5.0, 6.0]), result, "sum", average=True)
        >>> result
        tensor([3., 4.])
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def combine(
        self,
        arrivals: Sequence[torch.Tensor],
        own: torch.Tensor,
        result: torch.Tensor,
        op: ReduceOp,
        *,
        average: bool,
    ) -> None:
        """``arrivals`` are those of the peers in rank order. The own part, and the first arrival, may be the result."""
        rank = self._rank
        in_rank_order = [*arrivals[:rank], own, *arrivals[rank:]]
        total = self._float32(result) if in_float32(result.dtype, op) else result
        if len(in_rank_order) == 1:
            total.copy_(own)
        elif total.dtype == result.dtype:
            join = _JOINS[op]
            # The own run may be the result itself: it must be read before, or in the moment in which, it is written.
            first = arrivals[0] if rank > 1 else total
            join(in_rank_order[0], in_rank_order[1], out=first)
            for index, addend in enumerate(in_rank_order[2:], start=2):
                into = total if index >= rank else first
                join(first, addend, out=into)
                first = into
        else:
            total.copy_(in_rank_order[0])
            for addend in in_rank_order[1:]:
                total.add_(addend)
        if average:
            exact = total.is_floating_point() or total.is_complex()
            total.div_(len(in_rank_order), rounding_mode=None if exact else "floor")
        if total is not result:
            result.copy_(total)

    def _float32(self, like: torch.Tensor) -> torch.Tensor:
        kept = self._scratch.get(like.dtype)
        if kept is None or kept.numel() < like.numel():
            kept = self._scratch[like.dtype] = torch.empty(like.numel(), dtype=torch.float32, device=like.device)
        return kept[: like.numel()]

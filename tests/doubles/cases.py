"""Backends that lack one thing or another, and values whose reductions are known."""

from __future__ import annotations

from collections.abc import Sequence

import shardrt_hccl
import shardrt_nccl
import torch

from shardrt.comm import Capabilities, OpSupport

EVEN = OpSupport(uneven=False)
_REFUSED = OpSupport(world_sizes_refused=frozenset({3, 5}))
DTYPES = ("float32", "float64", "bfloat16", "int64", "complex64")


def only(*dtypes: str, uneven: bool = True) -> OpSupport:
    return OpSupport(dtypes=frozenset(dtypes), uneven=uneven)


def everything(support: OpSupport, *, average: bool = True) -> Capabilities:
    return Capabilities(
        average=average,
        reduce_scatter=support,
        all_gather=support,
        all_reduce=support,
        all_to_all=support,
        broadcast=support,
    )


CASES: dict[str, Capabilities] = {
    "all": Capabilities(),
    "no average": Capabilities(average=False),
    "even runs": Capabilities(reduce_scatter=EVEN, all_gather=EVEN),
    "even runs, no average": Capabilities(average=False, reduce_scatter=EVEN, all_gather=EVEN),
    "even everything": everything(EVEN),
    "no reduce_scatter": Capabilities(reduce_scatter=None),
    "no reduce_scatter, even all_to_all": Capabilities(reduce_scatter=None, all_to_all=EVEN),
    "no reduce_scatter nor all_to_all": Capabilities(reduce_scatter=None, all_to_all=None),
    "no reduce_scatter nor all_to_all nor average": Capabilities(reduce_scatter=None, all_to_all=None, average=False),
    "no all_gather": Capabilities(all_gather=None),
    "no all_gather, even all_to_all": Capabilities(all_gather=None, all_to_all=EVEN),
    "no all_gather nor all_to_all": Capabilities(all_gather=None, all_to_all=None),
    "no all_reduce": Capabilities(all_reduce=None),
    "no broadcast": Capabilities(broadcast=None),
    "no broadcast nor all_to_all": Capabilities(broadcast=None, all_to_all=None),
    "no broadcast, even rest": Capabilities(broadcast=None, all_to_all=EVEN, all_gather=EVEN),
    "all_to_all alone": Capabilities(reduce_scatter=None, all_gather=None, all_reduce=None, broadcast=None),
    "float32 words": everything(only("float32"), average=False),
    "float32 words, even": everything(only("float32", uneven=False), average=False),
    "bytes and float32": everything(only("uint8", "float32")),
    "int32 words move, no all_gather": Capabilities(
        reduce_scatter=only("float32"),
        all_gather=None,
        all_reduce=only("float32"),
        all_to_all=only("int32"),
        broadcast=only("int32"),
    ),
    "broadcast of words alone moves": Capabilities(
        reduce_scatter=None, all_gather=None, all_to_all=None, broadcast=only("float32")
    ),
    "no sizes 3 and 5": Capabilities(reduce_scatter=_REFUSED, all_gather=_REFUSED),
    "nccl": shardrt_nccl.CAPABILITIES,
    "ascend": shardrt_hccl.ascend.CAPABILITIES,
    "habana": shardrt_hccl.habana.CAPABILITIES,
}


def values(rank: int, count: int, dtype: str, salt: int = 0) -> torch.Tensor:
    """Small whole numbers, different everywhere, whose sums are exact in every dtype."""
    numbers = (torch.arange(count) * 7 + rank * 5 + salt * 3) % 13
    if dtype.startswith("complex"):
        return torch.complex(numbers.double(), (numbers - rank).double()).to(getattr(torch, dtype))
    return numbers.to(getattr(torch, dtype))


def total(world_size: int, count: int, dtype: str, salt: int = 0) -> torch.Tensor:
    return (
        torch.stack([values(rank, count, dtype, salt) for rank in range(world_size)]).sum(0).to(getattr(torch, dtype))
    )


def all_splits(world_size: int) -> list[list[int]]:
    return [
        [4] * world_size,
        [3 + 5 * rank for rank in range(world_size)],
        [0] * (world_size - 1) + [7],
        [5, *[0] * (world_size - 1)],
        [0] * world_size,
    ]


def own_runs(parts: Sequence[torch.Tensor], splits: list[int]) -> list[torch.Tensor]:
    """Each owner's run, out of what it brought."""
    return [part.split(splits)[owner] for owner, part in enumerate(parts)]

"""Marks on parameters whose values count in shards, and not in the whole tensor. See Note [Shards apart]."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_KEPT = "_shardrt_kept_dtype"


def note_kept_apart(tensors: Iterable[torch.Tensor], dtype: torch.dtype | None) -> None:
    """The values of these are kept in shards of this dtype; or, with None, in the tensors themselves."""
    for tensor in tensors:
        if dtype is not None:
            setattr(tensor, _KEPT, dtype)
        elif kept_dtype(tensor) is not None:
            delattr(tensor, _KEPT)


def kept_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype of the shards that count, or None where the tensor itself does.

    Example:
        >>> import torch
        >>> from shardrt.optim.kept import kept_dtype, note_kept_apart
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> note_kept_apart([weight], torch.float32)
        >>> kept_dtype(weight), kept_dtype(torch.ones(2))
        (torch.float32, None)
    """
    return vars(tensor).get(_KEPT)

"""Marks on what is not stored as it is: parameters whose values count in shards (see Note [Shards apart]), and buffers
that are computed with in another dtype."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

_KEPT = "_shardrt_kept_dtype"
_STORED = "_shardrt_stored_dtypes"


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


def note_stored_dtype(module: torch.nn.Module, name: str, dtype: torch.dtype) -> None:
    """A buffer of a module is cast for computing, and stored in the dtype that it had. Its module keeps the note, since
    modules put new tensors in the place of old ones."""
    vars(module).setdefault(_STORED, {}).setdefault(name, dtype)


def stored_dtypes(module: torch.nn.Module) -> Mapping[str, torch.dtype]:
    """The dtypes that buffers of a module are stored in, where these are not their own.

    Example:
        >>> import torch
        >>> from shardrt.optim.kept import note_stored_dtype, stored_dtypes
        >>> norm = torch.nn.BatchNorm1d(2).bfloat16()
        >>> note_stored_dtype(norm, "running_mean", torch.float32)
        >>> stored_dtypes(norm)
        {'running_mean': torch.float32}
    """
    found: Mapping[str, torch.dtype] = vars(module).get(_STORED, {})
    return found

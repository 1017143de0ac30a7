"""Carriers: moving elements of a dtype that a backend does not take as elements of one that it does.

Note [Bit patterns]: an operation that only moves data (all_gather, broadcast, all_to_all) may look at the same bytes
as any dtype. A reduction may not, with one exception: a sum of complex numbers is the sum of their parts.
Where a carrier's element is wider than the one it carries, a run need not fill a whole number of words and need not
start on a word's boundary, so it travels through scratch, in as many words as hold it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardrt.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from shardrt.comm.capabilities import OpSupport

REAL_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
CARRIERS = (torch.uint8, torch.int8, torch.int32, torch.float32)


def dtype_name(dtype: torch.dtype) -> str:
    """The name capabilities use.

    Example:
        >>> import torch
        >>> from shardrt.comm.carriers import dtype_name
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a name.

    Example:
        >>> from shardrt.comm.carriers import dtype_named
        >>> dtype_named("bfloat16")
        torch.bfloat16
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"unknown dtype {name!r}; give torch's name without 'torch.', such as 'float32'")
    return dtype


def reduce_carrier(support: OpSupport | None, dtype: torch.dtype, world_size: int) -> torch.dtype | None:
    """The dtype in which a backend can sum this one, or None.

    Example:
        >>> import torch
        >>> from shardrt.comm import OpSupport
        >>> from shardrt.comm.carriers import reduce_carrier
        >>> reduce_carrier(OpSupport(dtypes=frozenset({"float32"})), torch.complex64, 2)
        torch.float32
    """
    if support is None:
        return None
    for candidate in (dtype, REAL_PARTS.get(dtype)):
        if candidate is not None and support.takes(dtype_name(candidate), world_size=world_size):
            return candidate
    return None


def move_carrier(support: OpSupport | None, dtype: torch.dtype, world_size: int) -> torch.dtype | None:
    """The dtype as which a backend can move this one, the least work first, or None. See Note [Bit patterns].

    Example:
        >>> import torch
        >>> from shardrt.comm import OpSupport
        >>> from shardrt.comm.carriers import move_carrier
        >>> move_carrier(OpSupport(dtypes=frozenset({"float32"})), torch.float64, 2)
        torch.float32
    """
    if support is None:
        return None
    real = REAL_PARTS.get(dtype)
    fitting = [carrier for carrier in CARRIERS if dtype.itemsize % carrier.itemsize == 0]
    wider = [carrier for carrier in CARRIERS if dtype.itemsize % carrier.itemsize]
    for candidate in (dtype, *([real] if real else []), *fitting, *wider):
        if support.takes(dtype_name(candidate), world_size=world_size):
            return candidate
    return None


def words_for(numel: int, dtype: torch.dtype, carrier: torch.dtype) -> int:
    """How many elements of the carrier hold this many of the dtype.

    Example:
        >>> import torch
        >>> from shardrt.comm.carriers import words_for
        >>> words_for(3, torch.bfloat16, torch.float32), words_for(3, torch.float64, torch.float32)
        (2, 6)
    """
    return -(-numel * dtype.itemsize // carrier.itemsize)


def is_wider(carrier: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether runs of the dtype must be staged to travel in this carrier."""
    return carrier.itemsize > dtype.itemsize


def as_carrier(run: Tensor, carrier: torch.dtype) -> Tensor:
    """The same memory as elements of the carrier, which must not be wider."""
    return run if run.dtype == carrier else run.view(carrier)


def put(words: Tensor, run: Tensor) -> None:
    """Copy a run's bytes to the start of some words."""
    if is_wider(words.dtype, run.dtype):
        words.view(torch.uint8).narrow(0, 0, run.nbytes).copy_(run.view(torch.uint8))
    else:
        piece = as_carrier(run, words.dtype)
        words.narrow(0, 0, piece.numel()).copy_(piece)


def take(words: Tensor, run: Tensor) -> None:
    """Copy the bytes at the start of some words to a run."""
    if is_wider(words.dtype, run.dtype):
        run.view(torch.uint8).copy_(words.view(torch.uint8).narrow(0, 0, run.nbytes))
    else:
        piece = as_carrier(run, words.dtype)
        piece.copy_(words.narrow(0, 0, piece.numel()))


def as_elements(words: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
    """The elements that the start of some words hold, without a copy.

    Example:
        >>> import torch
        >>> from shardrt.comm.carriers import as_elements, put
        >>> words = torch.zeros(2, dtype=torch.int32)
        >>> put(words, torch.tensor([1, 2, 3], dtype=torch.int16))
        >>> as_elements(words, torch.int16, 3).tolist()
        [1, 2, 3]
    """
    if words.dtype == dtype:
        return words.narrow(0, 0, numel)
    if is_wider(words.dtype, dtype):
        return words.view(torch.uint8).narrow(0, 0, numel * dtype.itemsize).view(dtype)
    return words.narrow(0, 0, words_for(numel, dtype, words.dtype)).view(dtype)

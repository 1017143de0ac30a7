"""Short digests of tensors, to compare values between ranks without moving them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_digest(tensor: torch.Tensor | None) -> int | None:
    """A number made from the bits of a tensor: equal for equal bits, almost surely different otherwise.

    Example:
        >>> import torch
        >>> from shardrt.optim.digest import bit_digest
        >>> bit_digest(torch.ones(3)) == bit_digest(torch.ones(3)) != bit_digest(torch.zeros(3))
        True
    """
    if tensor is None:
        return None
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(_INTEGER_OF_SIZE[flat.element_size()])
    # Two halves with different weights, so that swapped values show.
    half = bits.numel() // 2
    first = int(bits[:half].sum(dtype=torch.int64)) if half else 0
    second = int(bits[half:].sum(dtype=torch.int64))
    return (first * 1_000_003 + second) % 2**63


def bit_digests(tensors: Iterable[torch.Tensor | None]) -> list[int | None]:
    """The digest of each tensor."""
    return [bit_digest(tensor) for tensor in tensors]

"""Plain values as JSON and back, with what JSON forgets: tuples, counters, keys that are no text, small tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None))
_LARGEST_TENSOR = 4096


def pack(value: Any) -> Any:
    """A JSON value from which :func:`unpack` makes an equal one; a ``TypeError`` says what there is no way for.

    Example:
        >>> from shardrt.joining.values import pack, unpack
        >>> unpack(pack({"betas": (0.9, 0.99), 3: [None, True]}))
        {'betas': (0.9, 0.99), 3: [None, True]}
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return [pack(item) for item in value]
    if type(value) is tuple:
        return {"tuple": [pack(item) for item in value]}
    if type(value) in (dict, Counter):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[pack(key), pack(item)] for key, item in value.items()]}
    if isinstance(value, torch.Tensor) and value.numel() <= _LARGEST_TENSOR:
        return {"tensor": [str(value.dtype).removeprefix("torch."), value.tolist()]}
    raise TypeError(f"a {type(value).__name__}")


def unpack(packed: Any) -> Any:
    """What :func:`pack` was given; tensors are on the CPU."""
    if isinstance(packed, list):
        return [unpack(item) for item in packed]
    if not isinstance(packed, dict):
        return packed
    [(kind, content)] = packed.items()
    if kind == "tuple":
        return tuple(unpack(item) for item in content)
    if kind == "tensor":
        return torch.tensor(content[1], dtype=getattr(torch, content[0]))
    pairs = {unpack(key): unpack(item) for key, item in content}
    return Counter(pairs) if kind == "counter" else pairs

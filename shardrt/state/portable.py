"""The whole state of models and optimizers, by parameter name, read piece by piece when it is wanted.

What a checkpoint of any kind opens as, and what one is written from: so every reader meets every writer, and neither
holds more than a window of the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from shardrt.plan.params import ITEM_SIZES, ParamSpec
from shardrt.protocols import TensorSpec


def dtype_called(name: str) -> torch.dtype:
    """The dtype that plans and files call by torch's name without ``torch.``.

    Example:
        >>> from shardrt.state.portable import dtype_called
        >>> dtype_called("bfloat16")
        torch.bfloat16
    """
    found: torch.dtype = getattr(torch, name)
    return found


@attrs.frozen(kw_only=True)
class LazyTensor:
    """A whole tensor whose elements are read when they are wanted.

    Example:
        >>> import torch
        >>> from shardrt.state.portable import LazyTensor
        >>> lazy = LazyTensor.of(torch.arange(6).view(2, 3))
        >>> lazy.dtype, lazy.shape, lazy.read(1, 3).tolist(), lazy.whole().tolist()
        ('int64', (2, 3), [1, 2], [[0, 1, 2], [3, 4, 5]])
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]
    """The elements ``[start, stop)`` in row-major order, flat, on the CPU. Whoever reads must not write to them."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> LazyTensor:
        """A tensor that is in memory already."""
        detached = tensor.detach()
        return cls(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            read=lambda start, stop: detached.reshape(-1)[start:stop].cpu(),
        )

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self.numel * ITEM_SIZES[self.dtype]

    @property
    def spec(self) -> TensorSpec:
        """What a file says of it."""
        return TensorSpec(dtype=self.dtype, shape=self.shape)

    def part(self, start: int, stop: int) -> LazyTensor:
        """The elements ``[start, stop)``, as a flat tensor that is read when it is wanted; all of them in their shape.

        Example:
            >>> import torch
            >>> from shardrt.state.portable import LazyTensor
            >>> LazyTensor.of(torch.arange(6).view(2, 3)).part(2, 5).whole()
            tensor([2, 3, 4])
        """
        if (start, stop) == (0, self.numel):
            return self
        read = self.read
        return LazyTensor(dtype=self.dtype, shape=(stop - start,), read=lambda lo, hi: read(start + lo, start + hi))

    def whole(self) -> torch.Tensor:
        """All of it, in its shape, in memory of its own."""
        read = self.read(0, self.numel).view(self.shape)
        return read.clone() if read.untyped_storage().nbytes() != self.nbytes else read


@attrs.frozen(kw_only=True)
class PortableOptimizer:
    """One optimizer's groups and state.

    Example:
        >>> from shardrt.state.portable import PortableOptimizer
        >>> PortableOptimizer(groups=({"lr": 0.1, "params": ["w"]},), state={"w": {"step": 3}}).step
        0
    """

    groups: tuple[Mapping[str, Any], ...]
    """The options of each parameter group, with the names of its parameters under ``params``."""
    state: Mapping[str, Mapping[str, Any]]
    """By parameter and key: a :class:`LazyTensor`, or a plain value. A parameter that was never stepped has none."""
    kind: str = ""
    """The name of the optimizer class, where it is known."""
    step: int = 0
    """Updates made, where that is known."""
    params: Mapping[str, ParamSpec] = attrs.field(factory=dict)
    """Its parameters, where they are known apart from the model's tensors and the state."""


@attrs.frozen(kw_only=True)
class PortableState:
    """Everything: models and optimizers by name (one of each is called ``model`` and ``optimizer``), and the rest.

    Example:
        >>> import torch
        >>> from shardrt.state.portable import LazyTensor, PortableState
        >>> state = PortableState(models={"model": {"w": LazyTensor.of(torch.ones(2))}}, optimizers={})
        >>> state.models["model"]["w"].whole()
        tensor([1., 1.])
    """

    models: Mapping[str, Mapping[str, LazyTensor]]
    """Parameters and buffers of each model by their names. Tied ones are one :class:`LazyTensor` under each name."""
    optimizers: Mapping[str, PortableOptimizer]
    extra: Any = None
    """What the trainer saved beside them: plain values and tensors."""
    buffers: Mapping[str, frozenset[str]] = attrs.field(factory=dict)
    """By model: which of its tensors are no parameters, where that is known."""
    values: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    """By model: what its modules keep beside tensors (``get_extra_state``)."""

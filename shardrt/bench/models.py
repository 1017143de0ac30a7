"""Models for benchmarks beside the demo's transformer: one of very many small parameters, and one of a few large.

Both really learn to predict the next byte, and so does whoever trains them: parameters that a wrong way updates differ
from those of a right one.
"""

from __future__ import annotations

import torch
from torch import nn

from shardrt.bench.shapes import FewMatrices, ManyVectors, ModelSize, Shape
from shardrt.demo.model import Block, ByteTransformer

_BYTES = 256
_MIXING = 2_654_435_761
"""A large odd number: products with it spread pairs of bytes over all vectors."""


def build_model(shape: Shape) -> nn.Module:
    """The model of a shape; the caller has set the seed.

    Example:
        >>> from shardrt.bench.models import build_model
        >>> from shardrt.bench.shapes import SHAPES
        >>> [len(list(build_model(SHAPES[name]).parameters())) for name in ("small", "many-small", "few-small")]
        [64, 1000, 5]
    """
    if isinstance(shape, ManyVectors):
        return Shelves(shelves=shape.shelves, vectors=shape.vectors, width=shape.width)
    if isinstance(shape, FewMatrices):
        return Matrices(matrices=shape.matrices, width=shape.width)
    assert isinstance(shape, ModelSize)
    return ByteTransformer(width=shape.width, layers=shape.layers, heads=shape.heads, context=shape.context)


class Shelf(nn.Module):
    """Some of the vectors, each a parameter of its own."""

    def __init__(self, vectors: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.randn(width) * width**-0.5 for _ in range(vectors))

    def forward(self) -> torch.Tensor:
        """All of them, as one table."""
        return torch.stack(list(self.vectors))


class Shelves(nn.Module):
    """Very many small parameters: a byte and the one before it choose two vectors, whose sum is compared to those of
    all bytes. What computes is cheap, so that whatever is done for each parameter shows.

    Example:
        >>> import torch
        >>> from shardrt.bench.models import Shelves
        >>> model = Shelves(shelves=2, vectors=200, width=8)
        >>> loss = model(torch.randint(256, (2, 9)))
        >>> loss.backward()
        >>> sum(param.grad is not None for param in model.parameters()), bool(loss > 0)
        (400, True)
    """

    def __init__(self, *, shelves: int, vectors: int, width: int) -> None:
        super().__init__()
        assert shelves * vectors >= _BYTES
        self.shelves = nn.ModuleList(Shelf(vectors, width) for _ in range(shelves))

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """The mean loss over a batch of windows."""
        table = torch.cat([shelf() for shelf in self.shelves])
        last, before, targets = window[:, 1:-1], window[:, :-2], window[:, 2:]
        pairs = (before * _BYTES + last + 1) * _MIXING % len(table)
        chosen = table[last] + table[pairs]
        return nn.functional.cross_entropy((chosen @ table[:_BYTES].T).flatten(0, 1), targets.flatten())


class Layer(nn.Module):
    """One large matrix, and what it adds to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * width**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch by time by width, in and out."""
        return x + nn.functional.gelu(x @ self.weight)


class Matrices(nn.Module):
    """A few large parameters: no more buckets than these can overlap, and whole ones do not balance.

    Example:
        >>> import torch
        >>> from shardrt.bench.models import Matrices
        >>> model = Matrices(matrices=3, width=16)
        >>> len(list(model.parameters())), bool(model(torch.randint(256, (2, 9))) > 0)
        (4, True)
    """

    def __init__(self, *, matrices: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_BYTES, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(width) for _ in range(matrices))

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """The mean loss over a batch of windows."""
        x = self.embedding(window[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = x @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


UNITS = (Block, Shelf, Layer)
"""What sharders of whole modules gather together, and what ``rt.shard`` chooses by itself."""

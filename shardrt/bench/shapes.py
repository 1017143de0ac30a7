"""The models that benchmarks train, as numbers: the demo's transformer in two sizes, and two extremes beside it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs


@attrs.frozen(kw_only=True)
class Shape:
    """What every model has: how many windows of text each rank takes per step, and how long they are."""

    context: int
    batch: int


@attrs.frozen(kw_only=True)
class ModelSize(Shape):
    """A shape of the demo's transformer."""

    width: int
    layers: int
    heads: int


@attrs.frozen(kw_only=True)
class ManyVectors(Shape):
    """A model of very many small parameters, see :class:`shardrt.bench.models.Shelves`."""

    shelves: int
    vectors: int
    """On each shelf."""
    width: int


@attrs.frozen(kw_only=True)
class FewMatrices(Shape):
    """A model of a few large parameters, see :class:`shardrt.bench.models.Matrices`."""

    matrices: int
    width: int


SIZES: Mapping[str, ModelSize] = MappingProxyType(
    {
        "small": ModelSize(width=128, layers=5, heads=4, context=64, batch=4),
        "40m": ModelSize(width=640, layers=8, heads=10, context=128, batch=2),
    }
)
"""About one million and about forty million parameters."""

SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        **SIZES,
        "many-small": ManyVectors(shelves=10, vectors=100, width=16, context=32, batch=2),
        "many-40m": ManyVectors(shelves=10, vectors=1000, width=64, context=64, batch=2),
        "few-small": FewMatrices(matrices=4, width=256, context=32, batch=2),
        "few-40m": FewMatrices(matrices=4, width=3200, context=32, batch=2),
    }
)
"""Also the extremes, each beside the size whose name ends likewise: 1,000 and 10,000 vectors; 5 matrices with one
third of a million and with 42 million elements."""

"""A parameter as planning sees it. No tensor and no torch: plans are made, stored and compared without them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from shardrt.errors import PlanError
from shardrt.plan.reading import is_count, read_count, read_flag, read_list, read_text

ITEM_SIZES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "complex32": 4,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element, by torch's dtype name without ``torch.``."""


@attrs.frozen(kw_only=True)
class ParamSpec:
    """One parameter: its fully qualified name, shape, dtype, whether it is trained, and its parameter group.

    Example:
        >>> from shardrt import ParamSpec
        >>> spec = ParamSpec(name="embed.weight", shape=(1000, 64), dtype="float32")
        >>> spec.numel, spec.nbytes
        (64000, 256000)
        >>> ParamSpec.from_json(spec.to_json()) == spec
        True
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    group: int = 0
    numel: int = attrs.field(init=False, eq=False)

    @numel.default
    def _count_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        try:
            return ITEM_SIZES[self.dtype]
        except KeyError:
            raise PlanError(_unknown_dtype(self.name, self.dtype)) from None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        try:
            return self.numel * ITEM_SIZES[self.dtype]
        except KeyError:
            raise PlanError(_unknown_dtype(self.name, self.dtype)) from None

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "trainable": self.trainable,
            "group": self.group,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ParamSpec:
        """The inverse of :meth:`to_json`; anything malformed is a :class:`~shardrt.errors.PlanError`."""
        name = read_text(data, "name", where="parameter")
        where = f"parameter {name!r}"
        shape = tuple(read_list(data, "shape", where=where))
        if not all(map(is_count, shape)):
            raise PlanError(f"'shape' of {where} must be a list of sizes from 0 up, got {list(shape)}")
        dtype = read_text(data, "dtype", where=where)
        if dtype not in ITEM_SIZES:
            raise PlanError(_unknown_dtype(name, dtype))
        return cls(
            name=name,
            shape=shape,
            dtype=dtype,
            trainable=read_flag(data, "trainable", where=where),
            group=read_count(data, "group", where=where),
        )


def _unknown_dtype(name: str, dtype: str) -> str:
    return f"parameter {name!r} has dtype {dtype!r}; known dtypes: {', '.join(ITEM_SIZES)}"

"""What a parameter weighs when whole parameters are balanced over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from shardrt.errors import ConfigError
from shardrt.plan import ParamSpec


def trainable_bytes(spec: ParamSpec) -> int:
    """Bytes, of trained parameters only: what optimizer state grows with."""
    return spec.nbytes if spec.trainable else 0


def elements(spec: ParamSpec) -> int:
    """Elements, trained or not."""
    return spec.numel


def all_bytes(spec: ParamSpec) -> int:
    """Bytes, trained or not."""
    return spec.nbytes


def matrix_work(spec: ParamSpec) -> int:
    """The work of an optimizer that orthogonalises whole matrices, such as Muon; nothing for a frozen parameter.

    A Newton-Schulz iteration multiplies an m x n matrix with its transpose on the shorter side: about ``m * n *
    min(m, n)``. Kernels of convolutions are folded to (first dim) x (all others) as such optimizers do. Vectors and
    scalars go to an elementwise optimizer: their elements.

    Example:
        >>> from shardrt import ParamSpec
        >>> from shardrt_greedy.costs import matrix_work
        >>> matrix_work(ParamSpec(name="conv.weight", shape=(8, 3, 5, 5), dtype="float32"))
        4800
    """
    if not spec.trainable:
        return 0
    if len(spec.shape) < 2 or not spec.numel:
        return spec.numel
    rows = spec.shape[0]
    return spec.numel * min(rows, spec.numel // rows)


COSTS: Mapping[str, Callable[[ParamSpec], int]] = {
    "trainable": trainable_bytes,
    "elements": elements,
    "bytes": all_bytes,
    "matrix": matrix_work,
}
"""The costs that are chosen by name."""

IN_BYTES = frozenset({"trainable", "bytes"})
"""Costs in the unit of ``PartitionRequest.load``."""


def weighed_by(weigh: Callable[[ParamSpec], float], specs: Sequence[ParamSpec]) -> list[int]:
    """Costs from a user's function as integers, in proportion.

    Integers add up to the same sum in any order, and floats do not; the largest cost becomes 2**53, so that none loses
    more than a float would.

    Example:
        >>> from shardrt import ParamSpec
        >>> from shardrt_greedy.costs import weighed_by
        >>> specs = [ParamSpec(name=str(size), shape=(size,), dtype="float32") for size in (1, 2)]
        >>> light, heavy = weighed_by(lambda spec: 0.1 * spec.numel, specs)
        >>> heavy == 2 * light
        True
    """
    costs = [_checked(weigh(spec), spec) for spec in specs]
    largest = max(costs, default=0.0)
    if not largest:
        return [0] * len(costs)
    return [round(cost / largest * 2**53) for cost in costs]


def _checked(cost: object, spec: ParamSpec) -> float:
    if isinstance(cost, bool) or not isinstance(cost, (int, float)) or not math.isfinite(cost) or cost < 0:
        raise ConfigError(
            f"costs returned {cost!r} for parameter {spec.name!r}; it must return a finite number from 0 up"
        )
    return float(cost)

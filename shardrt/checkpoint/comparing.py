"""What differs between two states: tensors element by element, block by block; everything else value by value.

Elements are compared by their bits: NaN equals the same NaN, and -0.0 is not 0.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import torch

from shardrt.checkpoint.spreading import first_names
from shardrt.plan.params import ITEM_SIZES
from shardrt.state.portable import LazyTensor, PortableOptimizer, PortableState
from shardrt.state.streams import as_bytes

Advance = Callable[[int], None]
WINDOW_BYTES = 2**20
"""What is held of each of the two."""
_LONGEST = 200


@attrs.frozen(kw_only=True)
class Difference:
    """One thing that is not the same in both."""

    name: str
    kind: str
    """``elements``, ``dtype``, ``shape``, ``value``, or ``only in a``, ``only in b``."""
    a: str | None = None
    b: str | None = None
    """How each looks; None where it is not there, or where it is tensors of equal shape and dtype."""
    differing: int | None = None
    """How many elements differ, of tensors with equal shapes."""
    elements: int | None = None
    max_abs: float | None = None
    """The largest difference; infinite or NaN where one of the elements is."""

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values; a number that JSON has no word for is text."""
        found = attrs.asdict(self)
        if self.max_abs is not None and not math.isfinite(self.max_abs):
            found["max_abs"] = str(self.max_abs)
        return found


def compare_states(a: PortableState, b: PortableState, advance: Advance = lambda _: None) -> Iterator[Difference]:
    """The differences, in the order of the first state and then of what only the second has.

    Example:
        >>> import torch
        >>> from shardrt.checkpoint.comparing import compare_states
        >>> from shardrt.state.portable import LazyTensor, PortableState
        >>> a, b = (
        ...     PortableState(models={"model": {"w": LazyTensor.of(torch.tensor(values))}}, optimizers={})
        ...     for values in ([1.0, 2.0, 3.0], [1.0, 2.5, 3.0])
        ... )
        >>> [(one.name, one.kind, one.differing, one.max_abs) for one in compare_states(a, b)]
        [('models/model/w', 'elements', 1, 0.5)]
    """
    left, right = dict(state_leaves(a)), dict(state_leaves(b))
    for name in dict.fromkeys((*left, *right)):
        if name not in right:
            yield Difference(name=name, kind="only in a", a=shown(left[name]))
        elif name not in left:
            yield Difference(name=name, kind="only in b", b=shown(right[name]))
        elif (found := _compare(name, left[name], right[name], advance)) is not None:
            yield found


def state_bytes(state: PortableState) -> int:
    """Bytes of all tensors that :func:`compare_states` reads of a state."""
    return sum(leaf.nbytes for _, leaf in state_leaves(state) if isinstance(leaf, LazyTensor))


def state_leaves(state: PortableState) -> Iterator[tuple[str, Any]]:
    """Everything in a state by a name of its own: tensors, and values that hold no others."""
    for name, tensors in state.models.items():
        first, aliases = first_names(tensors)
        for key, lazy in first.items():
            yield f"models/{name}/{key}", lazy
        for alias, key in aliases.items():
            yield f"models/{name}/{alias}", _Same(key)
        for key, value in state.values.get(name, {}).items():
            yield from leaves(value, f"models/{name}/{key}")
    for name, one in state.optimizers.items():
        yield from _optimizer_leaves(f"optimizers/{name}", one)
    yield from leaves({} if state.extra is None else state.extra, "extra")


def _optimizer_leaves(where: str, one: PortableOptimizer) -> Iterator[tuple[str, Any]]:
    yield f"{where}/class", one.kind
    yield f"{where}/step", one.step
    for number, group in enumerate(one.groups):
        yield f"{where}/groups[{number}]['params']", list(group["params"])
        for key, value in group.items():
            if key != "params":
                yield from leaves(value, f"{where}/groups[{number}][{key!r}]")
    for param, values in one.state.items():
        for key, value in values.items():
            yield from leaves(value, f"{where}/{param}/{key}")


@attrs.frozen
class _Same:
    """Another name of a tensor."""

    name: str


def leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """The values inside a value, by where they are. What holds nothing is one itself.

    Example:
        >>> from shardrt.checkpoint.comparing import leaves
        >>> list(leaves({"a": [1, (2,)], "b": {}}, "extra"))
        [("extra['a'][0]", 1), ("extra['a'][1][0]", 2), ("extra['b']", {})]
    """
    if isinstance(value, torch.Tensor):
        yield where, LazyTensor.of(value)
    elif isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)) and value:
        for number, item in enumerate(value):
            yield from leaves(item, f"{where}[{number}]")
    else:
        yield where, value


def shown(value: Any) -> str:
    """A value for people.

    Example:
        >>> import torch
        >>> from shardrt.checkpoint.comparing import shown
        >>> from shardrt.state.portable import LazyTensor
        >>> shown(LazyTensor.of(torch.ones(2, 3))), shown(0.1)
        ('float32 [2, 3]', '0.1')
    """
    if isinstance(value, LazyTensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, _Same):
        return f"the same tensor as {value.name}"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _compare(name: str, a: Any, b: Any, advance: Advance) -> Difference | None:
    if isinstance(a, LazyTensor) and isinstance(b, LazyTensor):
        return _compare_tensors(name, a, b, advance)
    same = type(a) is type(b) and _equal(a, b)
    return None if same else Difference(name=name, kind="value", a=shown(a), b=shown(b))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, (np.ndarray, np.generic)):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)
    return bool(a == b)


def _compare_tensors(name: str, a: LazyTensor, b: LazyTensor, advance: Advance) -> Difference | None:
    if a.shape != b.shape:
        advance(a.nbytes)
        return Difference(name=name, kind="shape", a=shown(a), b=shown(b))
    differing, most = 0, 0.0
    step = WINDOW_BYTES // max(ITEM_SIZES[a.dtype], ITEM_SIZES[b.dtype])
    for start in range(0, a.numel, step):
        stop = min(start + step, a.numel)
        count, largest = _compare_windows(a.read(start, stop), b.read(start, stop))
        differing += count
        most = largest if math.isnan(largest) or largest > most else most
        advance((stop - start) * ITEM_SIZES[a.dtype])
    if a.dtype != b.dtype:
        found = Difference(name=name, kind="dtype", a=shown(a), b=shown(b))
    elif differing:
        found = Difference(name=name, kind="elements")
    else:
        return None
    return attrs.evolve(found, differing=differing, elements=a.numel, max_abs=most)


def _compare_windows(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float]:
    """How many elements differ, and the largest difference, NaN where it is one."""
    if a.dtype == b.dtype:
        rows = (a.numel(), a.element_size())
        unlike = (as_bytes(a).view(rows) != as_bytes(b).view(rows)).any(dim=1)
        if not unlike.any():
            return 0, 0.0
        a, b = a[unlike], b[unlike]
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    distance = (a.to(wide) - b.to(wide)).abs()
    distance = torch.where(a.to(wide) == b.to(wide), torch.zeros_like(distance), distance)  # infinities of one sign
    count = a.numel() if a.dtype == b.dtype else int(torch.count_nonzero(distance))
    return count, float(distance.max()) if distance.numel() else 0.0

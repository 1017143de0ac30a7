"""Files that have broken formats before, or would: lists of tensors, and bytes to read layouts from."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from shardrt.plan import ITEM_SIZES
from shardrt.protocols import FileLayout, TensorSpec

EXECUTED = "_shardrt_executed"
"""The attribute of ``sys`` that exists once something in a file was run."""
_CODE = f"__import__('sys').__dict__.update({EXECUTED}=True)"


@attrs.frozen(kw_only=True)
class Contents:
    """What is going to be stored in one file."""

    tensors: Mapping[str, TensorSpec]
    metadata: Mapping[str, str] = attrs.field(factory=dict)


def contents() -> dict[str, Contents]:
    """Named contents of files.

    Example:
        >>> from shardrt.testing.conformance.layouts import contents
        >>> len(contents()["thousand"].tensors)
        1000
    """
    shapes = ((), (1,), (0,), (3,), (2, 3), (0, 4), (1, 1, 1, 5), (7, 1, 2))
    return {
        "nothing": Contents(tensors={}),
        "metadata_alone": Contents(tensors={}, metadata={"step": "7"}),
        "one_scalar": Contents(tensors={"step": TensorSpec(dtype="int64", shape=())}),
        "no_elements": Contents(tensors={f"t{index}": _spec((0, index)) for index in range(3)}),
        "some_without_elements": Contents(
            tensors={f"t{index}": _spec(shape) for index, shape in enumerate([(0,), (3,), (0, 2), (2,), (1, 0)])}
        ),
        **{
            f"dtype_{dtype}": Contents(tensors={str(shape): TensorSpec(dtype=dtype, shape=shape) for shape in shapes})
            for dtype in ITEM_SIZES
        },
        "all_dtypes": Contents(
            tensors={dtype: TensorSpec(dtype=dtype, shape=(3, 2)) for dtype in ITEM_SIZES}, metadata={"a": "b"}
        ),
        "unaligned": Contents(
            tensors={"one": TensorSpec(dtype="uint8", shape=(1,)), "eight": TensorSpec(dtype="float64", shape=(2,))}
        ),
        "names": Contents(tensors={name: _spec((index,)) for index, name in enumerate(NAMES)}),
        "metadata": Contents(
            tensors={"w": _spec((2,))}, metadata={"": "", "a\nb": 'say "hi"\\\t', "é漢😀": "ü" * 1000, _CODE: _CODE}
        ),
        "many_dims": Contents(tensors={"t": _spec((1, 2) * 12)}),
        "thousand": Contents(tensors={f"layers.{index}.weight": _spec((index % 7, 2)) for index in range(1000)}),
    }


NAMES = (
    "w",
    "W",
    "encoder.layers.0.self_attn.in_proj_weight",
    "optimizer/exp_avg/layers.0.weight",
    "with space",
    " around ",
    'quoted "twice"',
    "it's",
    "back\\slash",
    "line\nbreak\ttab",
    "{}[],:",
    "größe",
    "重み",
    "😀",
    "e\N{COMBINING ACUTE ACCENT}",
    "\N{LATIN SMALL LETTER E WITH ACUTE}",
    "dtype",
    "header",
    "../../escape",
    "0",
    "null",
    "long" * 100,
    _CODE,
)
"""Names of tensors that every format must keep apart and give back as they were."""

ODD_NAMES = ("", "__metadata__", "nul\0", "\ud800", "metadata", "__proto__", "shape", "\ufeff")
"""Names that a format may refuse, and must not change."""

RUNS_WHEN_UNPICKLED = b"cbuiltins\neval\n(S" + repr(_CODE).encode() + b"\ntR."
"""A pickle, written by hand: whoever loads it runs it."""


def _spec(shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(dtype="float32", shape=shape)


@attrs.define
class CountedFile:
    """A file in memory that begins with some bytes and goes on with zeros, and counts what is read of it.

    Example:
        >>> from shardrt.testing.conformance.layouts import CountedFile
        >>> file = CountedFile(b"abc", size=10**15)
        >>> file.read(1, 5), file.bytes_read
        (b'bc\\x00\\x00', 4)
    """

    first: bytes
    size: int
    bytes_read: int = 0

    def read(self, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)``; what is not in the file may not be asked for."""
        assert 0 <= start <= stop <= self.size, f"read({start}, {stop}) of a file of {self.size} bytes"
        self.bytes_read += stop - start
        return self.first[start:stop].ljust(stop - start, b"\0") if start < len(self.first) else bytes(stop - start)


def misfit(layout: FileLayout, size: int) -> str:
    """What is wrong with a layout that was read from a file of ``size`` bytes; empty if it can be true.

    Example:
        >>> from shardrt.protocols import FileLayout, TensorSpec
        >>> from shardrt.testing.conformance.layouts import misfit
        >>> spec = TensorSpec(dtype="uint8", shape=(4,))
        >>> misfit(FileLayout(header=b"#", tensors={"t": spec}, offsets={"t": 2}, size=5), size=5)
        "tensor 't' begins at 2, and what is before it ends at 1"
    """
    if layout.size != size:
        return f"the layout is of {layout.size} bytes, and the file has {size}"
    if list(layout.tensors) != list(layout.offsets):
        return f"tensors {list(layout.tensors)} and offsets {list(layout.offsets)} differ"
    reached = len(layout.header)
    for name, spec in layout.tensors.items():
        if spec.dtype not in ITEM_SIZES or any(type(length) is not int or length < 0 for length in spec.shape):
            return f"tensor {name!r} is {spec}"
        if layout.offsets[name] != reached:
            return f"tensor {name!r} begins at {layout.offsets[name]}, and what is before it ends at {reached}"
        reached += spec.nbytes
    return "" if reached == size else f"tensors end at {reached}, and the file at {size}"

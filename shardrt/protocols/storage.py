"""The shape of what files are made of and kept in: formats and places."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import attrs

from shardrt.plan.params import ITEM_SIZES


@attrs.frozen(kw_only=True)
class TensorSpec:
    """A tensor as a file format sees it: torch's name of its dtype without ``torch.``, and its shape.

    Example:
        >>> from shardrt.protocols import TensorSpec
        >>> TensorSpec(dtype="float32", shape=(2, 3)).nbytes
        24
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@attrs.frozen(kw_only=True)
class FileLayout:
    """One file: the bytes it begins with, and where the bytes of each tensor are.

    A tensor's bytes are raw, little-endian and in row-major order, so that a range of its elements is a range of bytes.

    Example:
        >>> from shardrt.protocols import FileLayout, TensorSpec
        >>> spec = TensorSpec(dtype="uint8", shape=(4,))
        >>> FileLayout(header=b"#", tensors={"t": spec}, offsets={"t": 1}, size=5).range_of("t", 2, 4)
        (3, 5)
    """

    header: bytes
    tensors: Mapping[str, TensorSpec]
    """In the order of their bytes, which follow the header and one another."""
    offsets: Mapping[str, int]
    """Where the bytes of each tensor begin in the file."""
    size: int
    """Bytes of the whole file."""
    metadata: Mapping[str, str] = attrs.field(factory=dict)

    def range_of(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """The bytes of the elements ``[start, stop)`` of a tensor."""
        item, offset = ITEM_SIZES[self.tensors[name].dtype], self.offsets[name]
        return offset + start * item, offset + stop * item


@runtime_checkable
class StateFormat(Protocol):
    """Lays named tensors out in a file. It only lays out: the runtime moves, checks and verifies the bytes.

    Nothing that is found in a file is ever executed, and nothing in a header is believed before it is checked.
    """

    name: str
    suffix: str
    """What the names of its files end in, with the dot."""

    def layout(self, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> FileLayout:
        """The layout of a file that is going to be written."""
        ...

    def read_layout(self, read: Callable[[int, int], bytes], size: int) -> FileLayout:
        """The layout of a file of ``size`` bytes, of which ``read(start, stop)`` gives any.

        Anything malformed (a header longer than the file, ranges that overlap, leave the file or do not fit the shape)
        is a :class:`~shardrt.errors.CheckpointError` that names the tensor.
        """
        ...


class PlaceFile(Protocol):
    """A file that is being written, front to back."""

    def write(self, data: memoryview | bytes, /) -> None:
        """Append all of it."""
        ...

    def commit(self) -> None:
        """Make it durable under its name; nothing is written afterwards."""
        ...

    def abandon(self) -> None:
        """Give it up, and remove what can be removed of it. After ``commit`` this does nothing."""
        ...


@runtime_checkable
class Place(Protocol):
    """Where checkpoints live: files under one root, by relative paths with forward slashes.

    Errors of the system come as :class:`~shardrt.errors.CheckpointError` with the path, except that a file which is not
    there is a ``FileNotFoundError``. A path that leaves the root is refused.
    """

    name: str
    root: str
    """For messages: where this is."""

    def create(self, path: str) -> PlaceFile:
        """Begin a file, with the directories it needs."""
        ...

    def publish(self, path: str, data: bytes) -> None:
        """A small file that appears wholly and durably or not at all, in place of what had its name."""
        ...

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes ``[start, stop)`` of a file, or to its end; a file that is shorter gives what there is."""
        ...

    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        """Fill a buffer of bytes from ``start`` on; returns how many there were."""
        ...

    def size(self, path: str) -> int:
        """Bytes of a file."""
        ...

    def list(self, path: str = "") -> list[str]:
        """Names in a directory, sorted; directories end in a slash. One that is not there has none."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with all that is in it; what is not there needs no removing."""
        ...

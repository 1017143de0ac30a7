"""A tensor inside an archive of ``torch.save``, found without unpickling and read by range.

An archive is a zip file that compresses nothing. Its ``data.pkl`` says dtype, sizes and strides, and is read as inert
data; the tensor's bytes are one record, and are mapped where they lie.
"""

from __future__ import annotations

import mmap
import struct
import zipfile
from typing import Any

import attrs
import numpy as np

from shardrt.errors import CheckpointError
from shardrt.interchange.boxes import Words, word_of
from shardrt.interchange.files import MappedFile
from shardrt.interchange.inert_pickle import Name, Record, Reference, read_inert, told
from shardrt.plan.params import ITEM_SIZES

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}
_LOCAL_HEADER = struct.Struct("<4s22sHH")
_LONGEST_DESCRIPTION = 1 << 20
"""Bytes of a ``data.pkl`` that describes one tensor: some hundreds are usual."""


@attrs.frozen(kw_only=True)
class StoredTensor:
    """What a ``data.pkl`` says about the one tensor that it holds."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """Elements before the first one in the storage."""
    storage_bytes: int
    key: str
    """The name of the record with the bytes of the storage."""


def open_tensor(file: MappedFile, start: int, length: int, *, dtype: str, shape: tuple[int, ...], where: str) -> Words:
    """The elements of the tensor in the archive at ``[start, start + length)``, as an array over the mapped file.

    Refuses anything but one dense tensor of this dtype and shape, whole in the file.
    """
    view = _View(file.map(), start, length)
    try:
        with zipfile.ZipFile(view) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
                raise CheckpointError(f"{where} is a compressed archive; torch writes them uncompressed")
            pickled = entries.get("data.pkl")
            if pickled is None or pickled.file_size > _LONGEST_DESCRIPTION:
                raise CheckpointError(f"{where} has no data.pkl that could describe one tensor")
            order = archive.read(entries["byteorder"]) if "byteorder" in entries else b"little"
            described = read_inert(archive.read(pickled), where=f"data.pkl of {where}")
    except CheckpointError:
        raise
    except Exception as error:
        # zipfile raises many kinds on bytes that are no archive.
        raise CheckpointError(f"{where} is not an archive of torch.save: {error or type(error).__name__}") from None
    if order != b"little":
        raise CheckpointError(f"{where} has its bytes in the order {order[:10]!r}; only little-endian files are read")
    stored = describe(described, where=where)
    if (stored.dtype, stored.shape) != (dtype, shape):
        raise CheckpointError(
            f"{where} holds a tensor {stored.dtype} {stored.shape}, but the metadata says {dtype} {shape}"
        )
    record = entries.get(f"data/{stored.key}")
    if record is None or record.file_size != stored.storage_bytes:
        raise CheckpointError(
            f"{where} describes a storage of {stored.storage_bytes} bytes, but its record "
            f"{f'has {record.file_size}' if record else 'is not there'}"
        )
    return _over(view, record.header_offset, stored, where)


def _over(view: _View, header: int, stored: StoredTensor, where: str) -> Words:
    magic, _, name_length, extra_length = _LOCAL_HEADER.unpack(view.piece(header, _LOCAL_HEADER.size))
    begin = header + _LOCAL_HEADER.size + name_length + extra_length
    if magic != b"PK\x03\x04" or begin + stored.storage_bytes > view.length:
        raise CheckpointError(f"{where} has a record that leaves its archive")
    item = ITEM_SIZES[stored.dtype]
    reached = stored.offset + sum((n - 1) * s for n, s in zip(stored.shape, stored.strides, strict=True)) + 1
    empty = 0 in stored.shape
    if not empty and reached * item > stored.storage_bytes:
        raise CheckpointError(f"{where} has a tensor that leaves its storage of {stored.storage_bytes} bytes")
    return np.ndarray(
        stored.shape,
        dtype=word_of(stored.dtype),
        buffer=b"" if empty else view.data,
        offset=0 if empty else view.start + begin + stored.offset * item,
        strides=[stride * item for stride in stored.strides],
    )


def describe(described: Any, *, where: str) -> StoredTensor:
    """Take the description of one dense tensor apart; every part of it is checked."""
    if isinstance(described, Record) and described.is_a("torch._utils._rebuild_parameter") and described.args:
        described = described.args[0]
    makers = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
    if not isinstance(described, Record) or not described.is_a(*makers) or len(described.args) < 4:
        raise CheckpointError(f"{where} holds {told(described)} where a dense tensor is expected; nothing was run")
    storage, offset, shape, strides = described.args[:4]
    kind, key, count = _storage(storage, where)
    if kind == "torch.storage.UntypedStorage":
        named = described.args[6] if len(described.args) > 6 else None
        dtype = named.name if isinstance(named, Name) and named.module == "torch" else None
        item = 1
    else:
        dtype = _STORAGES.get(kind.removeprefix("torch."))
        item = ITEM_SIZES.get(dtype or "", 0)
    if dtype is None or dtype not in ITEM_SIZES:
        raise CheckpointError(f"{where} holds elements of {dtype or kind}; known dtypes: {', '.join(ITEM_SIZES)}")
    for numbers in (shape, strides):
        if not isinstance(numbers, tuple) or not all(map(is_size, numbers)) or len(numbers) != len(shape):
            raise CheckpointError(f"{where} holds a tensor with sizes or strides that are not numbers from 0 up")
    if not is_size(offset) or not is_size(count):
        raise CheckpointError(f"{where} holds a tensor with an offset or a storage size below 0")
    return StoredTensor(dtype=dtype, shape=shape, strides=strides, offset=offset, storage_bytes=count * item, key=key)


def _storage(storage: Any, where: str) -> tuple[str, str, Any]:
    parts = storage.id if isinstance(storage, Reference) else None
    if isinstance(parts, tuple) and len(parts) == 5 and parts[0] == "storage":
        _, kind, key, _, count = parts
        if isinstance(kind, Name) and isinstance(key, str):
            return str(kind), key, count
    raise CheckpointError(f"{where} holds a tensor without a storage of its own")


def is_size(value: Any) -> bool:
    """Whether it is a whole number from 0 up that a tensor could have."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


class _View:
    """A stretch of a mapped file as the file that zipfile wants."""

    def __init__(self, data: mmap.mmap, start: int, length: int) -> None:
        self.data, self.start, self.length, self._at = data, start, length, 0

    def piece(self, begin: int, count: int) -> bytes:
        begin = min(max(begin, 0), self.length)
        return self.data[self.start + begin : self.start + min(begin + count, self.length)]

    def read(self, count: int = -1) -> bytes:
        taken = self.piece(self._at, self.length if count is None or count < 0 else count)
        self._at += len(taken)
        return taken

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self.length)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

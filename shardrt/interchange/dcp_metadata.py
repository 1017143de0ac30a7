"""The metadata of a ``torch.distributed.checkpoint`` directory, read as inert data and checked against its files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from shardrt.errors import CheckpointError, NoCheckpointError
from shardrt.interchange.archives import is_size
from shardrt.interchange.boxes import Box, check_boxes
from shardrt.interchange.files import MappedFile, inside
from shardrt.interchange.inert_pickle import Name, Pairs, Record, read_inert, told
from shardrt.plan.params import ITEM_SIZES

METADATA = ".metadata"
_MOST_BYTES = 512 << 20
"""Bytes of metadata. Half a million chunks take some 100 MB."""
_LONGEST_PATH = 64
_MODULE = "torch.distributed.checkpoint"


@attrs.frozen(kw_only=True)
class StoredItem:
    """Where the archive of one chunk or value is."""

    file: MappedFile
    offset: int
    length: int


@attrs.frozen(kw_only=True)
class Chunk:
    """A part of a tensor: the box that it fills, and where its archive is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: StoredItem


@attrs.frozen(kw_only=True)
class TensorEntry:
    """A tensor of the directory, with chunks that cover it once."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@attrs.frozen(kw_only=True)
class Directory:
    """What a directory holds: tensors and values by their flat keys, and the path of each in the nested state dict."""

    path: Path
    entries: Mapping[str, TensorEntry | StoredItem]
    paths: Mapping[str, tuple[str | int, ...]]


def read_directory(path: Path) -> Directory:
    """Read and check the metadata of a directory. See Note [Inert pickles]: nothing in it is run."""
    file = path / METADATA
    where = str(file)
    try:
        size = file.stat().st_size
        if size > _MOST_BYTES:
            raise CheckpointError(f"{where} has {size} bytes; up to {_MOST_BYTES} are read")
        data = file.read_bytes()
    except FileNotFoundError:
        raise NoCheckpointError(_no_metadata(path)) from None
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}") from error
    fields = _fields(read_inert(data, where=where), f"{_MODULE}.metadata.Metadata", where)
    reader = _Reader(path=path, where=where, stored=_storage(fields.get("storage_data"), where))
    entries = {
        _text(key, where): reader.entry(_text(key, where), entry)
        for key, entry in _pairs(fields.get("state_dict_metadata"), "state_dict_metadata", where)
    }
    reader.check_files()
    return Directory(path=path, entries=entries, paths=_paths(fields.get("planner_data"), entries, where))


def _no_metadata(path: Path) -> str:
    if list(path.glob("__*" + METADATA)):
        return f"{path} was saved by each rank for itself (use_collectives=False), which is not read; save it together"
    return f"{path} has no {METADATA}: it is no torch.distributed.checkpoint directory, or its save did not finish"


_Place = tuple[str, int, int]


@attrs.define
class _Reader:
    """Turns entries of the metadata into checked ones, and remembers which part of which file each takes."""

    path: Path
    where: str
    stored: dict[tuple[str, tuple[int, ...] | None], _Place]
    files: dict[str, MappedFile] = attrs.field(factory=dict)
    taken: dict[str, list[tuple[int, int, str]]] = attrs.field(factory=dict)

    def entry(self, key: str, entry: Any) -> TensorEntry | StoredItem:
        where = f"{self.where}: {key!r}"
        if isinstance(entry, Record) and entry.is_a(f"{_MODULE}.metadata.BytesStorageMetadata"):
            return self.item(key, None, where)
        fields = _fields(entry, f"{_MODULE}.metadata.TensorStorageMetadata", where)
        dtype = _dtype(fields.get("properties"), where)
        shape = _sizes(fields.get("size"), where)
        described = fields.get("chunks")
        if not isinstance(described, list):
            raise CheckpointError(f"{where} has {told(described)} where the list of its chunks is expected")
        boxes, chunks = [], []
        for each in described:
            of_chunk = _fields(each, f"{_MODULE}.metadata.ChunkStorageMetadata", where)
            offsets, sizes = _sizes(of_chunk.get("offsets"), where), _sizes(of_chunk.get("sizes"), where)
            boxes.append(Box(offsets=offsets, sizes=sizes, open=_closed))
        check_boxes(shape, boxes, where=where)
        for box in boxes:
            if not box.numel:
                continue  # an empty shard of a rank: there is nothing to read, and several may begin at one place
            item = self.item(key, box.offsets, where)
            if math.prod(box.sizes) * ITEM_SIZES[dtype] > item.length:
                raise CheckpointError(
                    f"{where} claims a chunk of {math.prod(box.sizes)} x {dtype} in an archive of {item.length} bytes"
                )
            chunks.append(Chunk(offsets=box.offsets, sizes=box.sizes, item=item))
        return TensorEntry(dtype=dtype, shape=shape, chunks=tuple(chunks))

    def item(self, key: str, offsets: tuple[int, ...] | None, where: str) -> StoredItem:
        place = self.stored.get((key, offsets))
        if place is None:
            at = "" if offsets is None else f" for its chunk at {offsets}"
            raise CheckpointError(f"{where} is not stored in any file{at}")
        name, offset, length = place
        file = self.file(name, where)
        if offset + length > file.size:
            raise CheckpointError(
                f"{where} is said to be at {offset} to {offset + length} of {file.path}, which has {file.size} bytes"
            )
        self.taken.setdefault(name, []).append((offset, offset + length, key))
        return StoredItem(file=file, offset=offset, length=length)

    def file(self, name: str, where: str) -> MappedFile:
        if name not in self.files:
            self.files[name] = MappedFile(inside(self.path, name, where=where))
            _refuse_safetensors(self.files[name])
        return self.files[name]

    def check_files(self) -> None:
        """Refuse items that share bytes: every item is an archive of its own."""
        for name, ranges in self.taken.items():
            ranges.sort()
            for (_, stop, one), (start, _, other) in itertools.pairwise(ranges):
                if start < stop:
                    raise CheckpointError(f"{self.where}: {one!r} and {other!r} overlap in {name}")


def _closed() -> Any:
    raise AssertionError("boxes of metadata are for checking only")


def _refuse_safetensors(file: MappedFile) -> None:
    with file.path.open("rb") as opened:
        start = opened.read(9)
    if start[8:] == b"{":
        raise CheckpointError(
            f"{file.path} was written with SerializationFormat.SAFETENSORS, which does not say where tensors are "
            "(torch's own FileSystemReader cannot read it either); save with the default format"
        )


def _storage(value: Any, where: str) -> dict[tuple[str, tuple[int, ...] | None], _Place]:
    stored: dict[tuple[str, tuple[int, ...] | None], _Place] = {}
    for index, info in _pairs(value, "storage_data", where):
        of_index = _fields(index, f"{_MODULE}.metadata.MetadataIndex", where)
        key = _text(of_index.get("fqn"), where)
        offset = of_index.get("offset")
        fields = _fields(info, f"{_MODULE}.filesystem._StorageInfo", f"{where}: {key!r}")
        if fields.get("transform_descriptors"):
            raise CheckpointError(f"{where}: {key!r} was stored through a transform (an extension), which is not read")
        begin, length = fields.get("offset"), fields.get("length")
        if not isinstance(begin, int) or not isinstance(length, int) or not is_size(begin) or not is_size(length):
            raise CheckpointError(f"{where}: {key!r} is said to be at {told(begin)} with a length of {told(length)}")
        place = (key, None if offset is None else _sizes(offset, where))
        stored[place] = (_text(fields.get("relative_path"), where), begin, length)
    return stored


def _paths(value: Any, entries: Mapping[str, Any], where: str) -> dict[str, tuple[str | int, ...]]:
    """The path of each key, in the order of the state dict that was saved; a key without one is a path by itself."""
    paths: dict[str, tuple[str | int, ...]] = {}
    for key, path in () if value is None else _pairs(value, "planner_data", where):
        parts = path if isinstance(path, tuple) else ()
        known = all(isinstance(part, (str, int)) and not isinstance(part, bool) for part in parts)
        if not 0 < len(parts) <= _LONGEST_PATH or not known:
            raise CheckpointError(f"{where}: {told(key)} has {told(path)} as its path in the state dict")
        if _text(key, where) in entries:
            paths[key] = parts
    paths.update({key: (key,) for key in entries if key not in paths})
    if len(set(paths.values())) != len(paths):
        raise CheckpointError(f"{where} gives two entries the same path in the state dict")
    return paths


def _fields(value: Any, kind: str, where: str) -> dict[str, Any]:
    if not isinstance(value, Record) or not value.is_a(kind):
        raise CheckpointError(
            f"{where} holds {told(value)} where {kind} is expected: not metadata of torch.distributed.checkpoint, "
            "and nothing in it was run"
        )
    return {_text(name, where): field for name, field in _pairs(value.state, "fields", where)}


def _pairs(value: Any, what: str, where: str) -> Sequence[tuple[Any, Any]]:
    if not isinstance(value, Pairs):
        raise CheckpointError(f"{where} holds {told(value)} where a dict ({what}) is expected")
    return value.pairs


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"{where} holds {told(value)} where a text is expected")
    return value


def _sizes(value: Any, where: str) -> tuple[int, ...]:
    if isinstance(value, Record) and value.is_a("torch.Size") and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, (tuple, list)) or not all(map(is_size, value)):
        raise CheckpointError(f"{where} holds {told(value)} where sizes from 0 up are expected")
    return tuple(value)


def _dtype(properties: Any, where: str) -> str:
    kind = f"{_MODULE}.metadata.TensorProperties"
    if not isinstance(properties, Record) or not properties.is_a(kind):
        raise CheckpointError(f"{where} holds {told(properties)} where {kind} is expected")
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Name) or dtype.module != "torch" or dtype.name not in ITEM_SIZES:
        raise CheckpointError(f"{where} has {told(dtype)} as its dtype; known dtypes: {', '.join(ITEM_SIZES)}")
    return dtype.name

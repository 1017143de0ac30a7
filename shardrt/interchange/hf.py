"""Weights as Hugging Face's libraries keep them: safetensors files, one or several with an index.

Note [Tied weights in safetensors]: a safetensors file cannot say that two names are one tensor, so the hub's libraries
store it once. Written here, it is stored under the first of its names, and the header's metadata maps each of the other
names to that one, as ``safetensors.torch.save_model`` does; ``transformers`` ties by the model's own rules and needs no
such entry. Read here, names that the metadata maps to a stored tensor are that tensor again. Two names are one tensor
if they have the same ``LazyTensor``: equal values are not enough.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.errors import CheckpointError, NoCheckpointError
from shardrt.interchange.boxes import Box, Words, lazy_boxes, word_of
from shardrt.interchange.files import MappedFile, inside
from shardrt.interchange.naming import few
from shardrt.protocols import FileLayout, StateFormat
from shardrt.registry import load_registry
from shardrt.state.portable import LazyTensor, PortableState

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
WHOLE = "model.safetensors"
_LARGEST_INDEX = 64 << 20
_SHARDED_BY_RANK = "DCP_SHARDING_INFO"


def safetensors_format() -> StateFormat:
    """The installed state format that lays out safetensors files."""
    return load_registry().state_formats.get("safetensors").factory()


def read_hf(path: str | Path, *, format: StateFormat | None = None) -> PortableState:
    """The weights in a safetensors file, or in a directory with one or with several and their index.

    Tensors are mapped and read by range. ``format`` lays out the files; the installed ``safetensors`` one if it is left
    out. See Note [Tied weights in safetensors].

    Example:
        >>> import tempfile, torch
        >>> from shardrt.interchange import read_hf, write_hf
        >>> from shardrt.state.portable import LazyTensor, PortableState
        >>> state = PortableState(models={"model": {"w": LazyTensor.of(torch.ones(3))}}, optimizers={})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_hf(state, folder)
        ...     read_hf(folder).models["model"]["w"].whole()
        tensor([1., 1., 1.])
    """
    given = Path(path)
    format = safetensors_format() if format is None else format
    if given.is_file():
        return PortableState(models={"model": _with_ties(*_read_file(given, format))}, optimizers={})
    if not given.is_dir():
        raise NoCheckpointError(f"{given} is neither a file nor a directory")
    indexes = sorted(given.glob("*" + INDEX_SUFFIX))
    if len(indexes) > 1:
        raise CheckpointError(f"{given} has several indexes: {few(each.name for each in indexes)}; name one file")
    if indexes:
        return PortableState(models={"model": _read_indexed(given, indexes[0], format)}, optimizers={})
    files = [given / WHOLE] if (given / WHOLE).is_file() else sorted(given.glob("*" + SUFFIX))
    if len(files) != 1:
        raise NoCheckpointError(
            f"{given} has no {WHOLE} and no index *{INDEX_SUFFIX}, and {len(files)} other {SUFFIX} files"
            + (": cannot tell which is meant; name one" if files else "")
        )
    return PortableState(models={"model": _with_ties(*_read_file(files[0], format))}, optimizers={})


def _read_indexed(directory: Path, index: Path, format: StateFormat) -> dict[str, LazyTensor]:
    files: dict[str, tuple[dict[str, LazyTensor], Mapping[str, str]]] = {}
    weights: dict[str, LazyTensor] = {}
    ties: dict[str, str] = {}
    for name, file in _weight_map(index).items():
        if file not in files:
            files[file] = _read_file(inside(directory, file, where=str(index)), format)
            ties.update(files[file][1])
        if name not in files[file][0]:
            raise CheckpointError(f"{index} says that {name!r} is in {file}, which does not have it")
        weights[name] = files[file][0][name]
    for file, (held, _) in files.items():
        if unlisted := [name for name in held if name not in weights]:
            raise CheckpointError(f"{index} does not list {few(unlisted)}, which {file} has")
    return _with_ties(weights, ties)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        if index.stat().st_size > _LARGEST_INDEX:
            raise CheckpointError(f"{index} has {index.stat().st_size} bytes; up to {_LARGEST_INDEX} are read")
        found = json.loads(index.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is not JSON: {error}") from None
    weight_map: Any = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no 'weight_map' from names of tensors to names of files")
    return weight_map


def _read_file(path: Path, format: StateFormat) -> tuple[dict[str, LazyTensor], Mapping[str, str]]:
    if not path.is_file():
        raise CheckpointError(f"{path} is not there")
    file = MappedFile(path)
    if file.size == 0:
        raise CheckpointError(f"{path} is empty")
    try:
        layout = format.read_layout(lambda start, stop: file.map()[start:stop], file.size)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if _SHARDED_BY_RANK in layout.metadata:
        raise CheckpointError(
            f"{path} holds shards of tensors, as torch's HuggingFaceStorageWriter saves them from several ranks; "
            "consolidate them with torch's consolidate_safetensors_files"
        )
    return {name: _lazy(file, layout, name) for name in layout.tensors}, layout.metadata


def _lazy(file: MappedFile, layout: FileLayout, name: str) -> LazyTensor:
    spec, offset = layout.tensors[name], layout.offsets[name]
    if offset < 0 or offset + spec.nbytes > file.size:
        raise CheckpointError(f"{file.path}: {name!r} leaves the file of {file.size} bytes")

    def opened() -> Words:
        return np.ndarray(spec.shape, dtype=word_of(spec.dtype), buffer=file.map(), offset=offset)

    box = Box(offsets=(0,) * len(spec.shape), sizes=spec.shape, open=opened)
    return lazy_boxes(spec.dtype, spec.shape, [box])


def _with_ties(weights: dict[str, LazyTensor], metadata: Mapping[str, str]) -> dict[str, LazyTensor]:
    tied = {name: weights[stored] for name, stored in metadata.items() if stored in weights and name not in weights}
    return {**weights, **tied}

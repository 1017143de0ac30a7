"""Whether what a header says about its tensors can be true of a file of this size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from shardrt.errors import CheckpointError
from shardrt.plan import ITEM_SIZES
from shardrt.protocols import TensorSpec
from shardrt_safetensors.dtypes import DTYPES, FOREIGN_WORDS, STAND_INS, TRUE_DTYPES, WORDS
from shardrt_safetensors.header import METADATA, parse_json, unsound

MOST_DIMS = 64
"""Of a tensor; torch's own loops take no more."""
MOST_BYTES = 2**63 - 1
FIELDS = {"dtype", "shape", "data_offsets"}


@attrs.frozen(kw_only=True)
class Entry:
    """A tensor of a file: what it is, and where its bytes begin, counted from the end of the header."""

    spec: TensorSpec
    begin: int
    end: int


def read_entries(header: Mapping[str, Any], room: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors in the order of their bytes, and the metadata. ``room`` is how many bytes follow the header.

    Example:
        >>> from shardrt_safetensors.checking import read_entries
        >>> header = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
        >>> read_entries(header, 8)[0]["w"].spec
        TensorSpec(dtype='float32', shape=(2,))
        >>> read_entries(header, 7)
        Traceback (most recent call last):
        ...
        shardrt.errors.CheckpointError: no sound safetensors file: tensor 'w' ends at byte 8 of 7 after the header
    """
    metadata = _metadata(header.get(METADATA, {}))
    true_dtypes = _true_dtypes(metadata.pop(TRUE_DTYPES, None))
    entries = {
        name: _entry(name, claims, true_dtypes.pop(name, None)) for name, claims in header.items() if name != METADATA
    }
    for name in true_dtypes:
        raise unsound(f"{TRUE_DTYPES} tells the dtype of tensor {shown(name)}, which is not there")
    # Stable, so that tensors without bytes, which begin where others do, stay in the order of the header.
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    _check_cover(ordered, room)
    return ordered, metadata


def shown(name: object) -> str:
    """A name as messages show it: one in a hostile file may have millions of characters."""
    text = str(name)
    return repr(text) if len(text) <= 100 else f"{text[:100]!r}..."


def _metadata(found: Any) -> dict[str, str]:
    if not isinstance(found, dict):
        raise unsound(f"{METADATA} is a {type(found).__name__} instead of an object")
    for key, value in found.items():
        if not isinstance(value, str):
            raise unsound(f"{METADATA} has a {type(value).__name__} under {shown(key)} instead of a string")
    return dict(found)


def _true_dtypes(text: str | None) -> dict[str, str]:
    if text is None:
        return {}
    try:
        found = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise unsound(f"{TRUE_DTYPES} in its metadata is not JSON as it should be: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise unsound(f"{TRUE_DTYPES} in its metadata is not a JSON object")
    for name, dtype in found.items():
        if not isinstance(dtype, str) or dtype not in STAND_INS:
            raise unsound(
                f"{TRUE_DTYPES} says {shown(dtype)} of tensor {shown(name)}; it can be {', '.join(STAND_INS)}"
            )
    return found


def _entry(name: str, claims: Any, true_dtype: str | None) -> Entry:
    if not isinstance(claims, dict) or claims.keys() != FIELDS:
        raise unsound(f"tensor {shown(name)} is not described by dtype, shape and data_offsets, and these alone")
    stored = TensorSpec(dtype=_dtype(name, claims["dtype"]), shape=_shape(name, claims["shape"]))
    begin, end = _offsets(name, claims["data_offsets"])
    # Sizes of 0 aside: (2**62, 2**62, 0) has no bytes, and yet strides that no reader can compute.
    if math.prod(filter(None, stored.shape)) * ITEM_SIZES[stored.dtype] > MOST_BYTES:
        raise unsound(f"tensor {shown(name)} has the shape {list(stored.shape)}, which is larger than any file")
    if end - begin != stored.nbytes:
        raise unsound(
            f"tensor {shown(name)} has {end - begin:,} bytes, and {stored.dtype} of shape {list(stored.shape)} "
            f"takes {stored.nbytes:,}"
        )
    return Entry(spec=stored if true_dtype is None else _true_spec(name, stored, true_dtype), begin=begin, end=end)


def _true_spec(name: str, stored: TensorSpec, dtype: str) -> TensorSpec:
    stand_in = STAND_INS[dtype].dtype
    if stored.dtype != stand_in or stored.shape[-1:] != (2,):
        raise unsound(
            f"tensor {shown(name)} is {dtype} by the metadata, which is stored as pairs of {WORDS[stand_in]}; "
            f"it is {WORDS[stored.dtype]} of shape {list(stored.shape)}"
        )
    return TensorSpec(dtype=dtype, shape=stored.shape[:-1])


def _dtype(name: str, word: Any) -> str:
    if isinstance(word, str) and word in FOREIGN_WORDS:
        raise CheckpointError(
            f"tensor {shown(name)} has the safetensors dtype {word}, which shardrt does not hold; it holds "
            f"{', '.join(DTYPES)}: convert the tensor before"
        )
    if not isinstance(word, str) or word not in DTYPES:
        raise unsound(f"tensor {shown(name)} has the unknown dtype {shown(word)}; known are {', '.join(DTYPES)}")
    return DTYPES[word]


def _shape(name: str, sizes: Any) -> tuple[int, ...]:
    if not _are_counts(sizes):
        raise unsound(f"tensor {shown(name)} has no shape of sizes from 0 up: {shown(sizes)}")
    if len(sizes) > MOST_DIMS:
        raise unsound(f"tensor {shown(name)} has {len(sizes):,} dims; {MOST_DIMS} is the most there may be")
    return tuple(sizes)


def _offsets(name: str, offsets: Any) -> tuple[int, int]:
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise unsound(f"tensor {shown(name)} has no data_offsets that begin before they end: {shown(offsets)}")
    return offsets[0], offsets[1]


def _are_counts(found: Any) -> bool:
    """Whether it is a list of whole numbers from 0 up; JSON's true and false are none."""
    return isinstance(found, list) and all(type(value) is int and 0 <= value <= MOST_BYTES for value in found)


def _check_cover(entries: Mapping[str, Entry], room: int) -> None:
    """Every byte after the header belongs to one tensor."""
    reached, before = 0, "the header"
    for name, entry in entries.items():
        if entry.end > room:
            raise unsound(f"tensor {shown(name)} ends at byte {entry.end:,} of {room:,} after the header")
        if entry.begin < reached:
            raise unsound(f"tensor {shown(name)} begins at byte {entry.begin:,}, where {before} is not at its end")
        if entry.begin > reached:
            raise unsound(f"{entry.begin - reached:,} bytes between {before} and tensor {shown(name)} are of no tensor")
        reached, before = entry.end, f"tensor {shown(name)}"
    if reached != room:
        raise unsound(f"{room - reached:,} bytes after {before} are of no tensor: it was written to, or badly")

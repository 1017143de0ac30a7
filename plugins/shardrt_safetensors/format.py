"""The format as the runtime uses it: laying files out, and reading layouts back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from shardrt.errors import StateError
from shardrt.plan import refuse_unknown_options
from shardrt.protocols import FileLayout, TensorSpec
from shardrt_safetensors.checking import MOST_DIMS, read_entries, shown
from shardrt_safetensors.dtypes import STAND_INS, TRUE_DTYPES, WORDS
from shardrt_safetensors.header import LENGTH_BYTES, METADATA, MOST_HEADER_BYTES, read_header

ALIGNMENT = 8
"""Headers are padded with spaces, so that the first tensor begins at a multiple of this."""


class SafetensorsFormat:
    """Eight bytes with the length of the header, a header in JSON, and the tensors' bytes back to back.

    Tensors keep the order they are given in. The library sorts them by the size of their elements, which aligns them,
    and reads any order. See Note [Complex numbers] for dtypes that the format lacks.

    Example:
        >>> from shardrt.protocols import TensorSpec
        >>> from shardrt_safetensors.format import SafetensorsFormat
        >>> layout = SafetensorsFormat().layout({"w": TensorSpec(dtype="float32", shape=(2, 3))}, {"step": "7"})
        >>> layout.header[8:].decode().rstrip()
        '{"__metadata__":{"step":"7"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
        >>> layout.size - len(layout.header)
        24
    """

    name = "safetensors"
    suffix = ".safetensors"

    def __init__(self, **unknown: Any) -> None:
        refuse_unknown_options("safetensors", unknown, known=())

    def layout(self, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> FileLayout:
        """The layout of a file that is going to be written, with the tensors in the order given."""
        header = _header(tensors, metadata)
        offset = len(header)
        offsets = {}
        for name, spec in tensors.items():
            offsets[name] = offset
            offset += spec.nbytes
        return FileLayout(header=header, tensors=dict(tensors), offsets=offsets, size=offset, metadata=dict(metadata))

    def read_layout(self, read: Callable[[int, int], bytes], size: int) -> FileLayout:
        """The layout of a file, once everything that its header claims has been checked."""
        raw, header = read_header(read, size)
        entries, metadata = read_entries(header, size - len(raw))
        return FileLayout(
            header=raw,
            tensors={name: entry.spec for name, entry in entries.items()},
            offsets={name: len(raw) + entry.begin for name, entry in entries.items()},
            size=size,
            metadata=metadata,
        )


def _header(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise StateError(f"metadata of a safetensors file are strings, got {key!r}: {value!r}; make both strings")
    if TRUE_DTYPES in metadata:
        raise StateError(f"the metadata have the key {TRUE_DTYPES!r}, which the format keeps for itself; rename it")
    true_dtypes = {name: spec.dtype for name, spec in tensors.items() if spec.dtype in STAND_INS}
    told = dict(metadata)
    if true_dtypes:
        told[TRUE_DTYPES] = _json(true_dtypes)
    document: dict[str, Any] = {METADATA: told} if told else {}
    begin = 0
    for name, spec in tensors.items():
        end = begin + _checked(name, spec).nbytes
        stored = _stored(spec)
        document[name] = {"dtype": WORDS[stored.dtype], "shape": list(stored.shape), "data_offsets": [begin, end]}
        begin = end
    try:
        text = _json(document).encode()
    except UnicodeEncodeError as error:
        culprit = str(error.object)[max(error.start - 40, 0) : error.end + 40]
        raise StateError(
            f"a name or a metadata value is no valid Unicode and cannot be stored: ...{culprit!r}...; rename it"
        ) from None
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > MOST_HEADER_BYTES:
        raise StateError(
            f"the header of {len(tensors):,} tensors and their metadata takes {len(text):,} bytes, and readers of "
            f"safetensors accept {MOST_HEADER_BYTES:,}; use several files, or shorter names and metadata"
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _checked(name: object, spec: TensorSpec) -> TensorSpec:
    if not isinstance(name, str) or name == METADATA:
        raise StateError(f"a tensor cannot be called {name!r} in a safetensors file; rename it")
    if spec.dtype not in WORDS and spec.dtype not in STAND_INS:
        known = ", ".join((*WORDS, *STAND_INS))
        raise StateError(f"tensor {shown(name)} has dtype {spec.dtype!r}; dtypes that can be stored: {known}")
    if len(_stored(spec).shape) > MOST_DIMS or any(type(size) is not int or size < 0 for size in spec.shape):
        raise StateError(f"tensor {shown(name)} has shape {spec.shape}; a shape is at most {MOST_DIMS} sizes from 0 up")
    return spec


def _stored(spec: TensorSpec) -> TensorSpec:
    """The tensor as the file shows it."""
    stand_in = STAND_INS.get(spec.dtype)
    return TensorSpec(dtype=stand_in.dtype, shape=(*spec.shape, 2)) if stand_in else spec


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

"""The least that lays out and reads safetensors files, for tests of what is above a state format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from shardrt.errors import CheckpointError
from shardrt.protocols import FileLayout, TensorSpec

_CODES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}


class PlainSafetensors:
    """Believes most of what it reads: the plugin's own tests are about what must not be believed."""

    name = "safetensors"
    suffix = ".safetensors"

    def layout(self, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> FileLayout:
        codes = {dtype: code for code, dtype in _CODES.items()}
        entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        relative, at = {}, 0
        ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].nbytes))
        for name, spec in ordered.items():
            relative[name] = at
            entries[name] = {
                "dtype": codes[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [at, at + spec.nbytes],
            }
            at += spec.nbytes
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        offsets = {name: len(header) + begin for name, begin in relative.items()}
        return FileLayout(
            header=header, tensors=ordered, offsets=offsets, size=len(header) + at, metadata=dict(metadata)
        )

    def read_layout(self, read: Callable[[int, int], bytes], size: int) -> FileLayout:
        length = int.from_bytes(read(0, 8), "little")
        if length > size - 8:
            raise CheckpointError(f"the header has {length} bytes, the file {size}")
        entries = json.loads(read(8, 8 + length))
        metadata = entries.pop("__metadata__", {})
        ordered = dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"]))
        return FileLayout(
            header=read(0, 8 + length),
            tensors={
                name: TensorSpec(dtype=_CODES[each["dtype"]], shape=tuple(each["shape"]))
                for name, each in ordered.items()
            },
            offsets={name: 8 + length + each["data_offsets"][0] for name, each in ordered.items()},
            size=size,
            metadata=metadata,
        )

"""What the format calls dtypes, and how those are stored that it has no word for."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

WORDS: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "float32": "F32",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}
"""The format's word for each dtype, by torch's name without ``torch.``."""

DTYPES: Mapping[str, str] = {word: dtype for dtype, word in WORDS.items()}

FOREIGN_WORDS = frozenset(
    ("F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "U16", "U32", "U64")  # safetensors 0.8
)
"""Words that the format has and the runtime has no use for: such a file is sound, and not for us."""


@attrs.frozen(kw_only=True)
class StandIn:
    """How a dtype is stored for which the format has no word: as pairs of a dtype that it has."""

    dtype: str
    """What each half of an element is; the stored shape has one more dim, of size 2."""


STAND_INS: Mapping[str, StandIn] = {
    "complex32": StandIn(dtype="float16"),
    "complex128": StandIn(dtype="float64"),
}
"""Note [Complex numbers]: the format has complex64 and no other complex dtype. Such a tensor is stored as real and
imaginary parts, which is what its bytes are: any tool reads it as the result of ``torch.view_as_real``. An entry of
the metadata, :data:`TRUE_DTYPES`, tells the dtype that it really has."""

TRUE_DTYPES = "shardrt.dtypes"
"""The key of the metadata that holds a JSON object: the true dtype of each tensor that is stored as something else."""

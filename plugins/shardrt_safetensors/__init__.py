"""The safetensors file format: a JSON header and raw tensors, readable by every tool that reads safetensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardrt.registry import StateFormatRecord, hookimpl

if TYPE_CHECKING:
    from shardrt_safetensors.format import SafetensorsFormat

SHARDRT_HOOK_VERSION = "1.0"


def make(**options: Any) -> SafetensorsFormat:
    """The factory of the record.

    Example:
        >>> import shardrt_safetensors
        >>> shardrt_safetensors.make().suffix
        '.safetensors'
    """
    from shardrt_safetensors.format import SafetensorsFormat

    return SafetensorsFormat(**options)


@hookimpl
def shardrt_state_formats() -> Iterable[StateFormatRecord]:
    """One record: ``safetensors``."""
    yield StateFormatRecord(
        name="safetensors", summary="a JSON header and raw tensors, as the library of that name", factory=make
    )

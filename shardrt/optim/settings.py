"""Whether all ranks are about to step with the same settings: learning rates, options, number of the step.

Note [Marks]: a scheduler that is fed a rank's own loss, or an option set on one rank, would give every shard its
owner's value, and since parameters stay equal on all ranks nobody would ever notice. So a few bytes made from the
settings travel with each bucket's reduction, once as they are and once negated: the largest of each over all ranks add
up to zero exactly where all ranks have the same. Where they do not, the settings are compared in full.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardrt.optim.agreement import comparable

_BYTES = 6
MARKS = 2 * _BYTES
"""How many small integers stand for the settings."""
_PLAIN = (bool, int, float, str, type(None))


class Settings:
    """The settings of the step that comes next."""

    def __init__(self, describe: Callable[[], Mapping[str, Any]], differ: Callable[[], None]) -> None:
        """``differ`` is called, on every rank, when ranks differ: it finds out in what, and raises."""
        self._describe = describe
        self._differ = differ

    def marks(self) -> list[int]:
        """Small integers made from the settings, and the same negated."""
        words = repr(self._describe()).encode()
        digest = (zlib.crc32(words) << 32) | zlib.crc32(words[::-1])
        values = [(digest >> (7 * place)) & 0x7F for place in range(_BYTES)]
        return [*values, *(-value for value in values)]

    def compare(self, largest: Sequence[int]) -> None:
        """Look at the largest marks of all ranks."""
        if any(value + negated for value, negated in zip(largest[:_BYTES], largest[_BYTES:], strict=True)):
            self._differ()


def options_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The options of parameter groups, as values that are equal on two ranks when the options are."""
    return [
        {
            key: value if isinstance(value, _PLAIN) else _comparable(value)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for group in groups
    ]


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return comparable(value)

"""Which names of a state and of a module do not meet: what a module's ``load_state_dict`` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules.module import _IncompatibleKeys

from shardrt.state.models import misfits
from shardrt.state.parts import MARK


def incompatible_keys(module: torch.nn.Module, given: Any) -> _IncompatibleKeys:
    """Of a whole state; parts of one, which say what they are of, have no such keys.

    Example:
        >>> import torch
        >>> from shardrt.state.fitting import incompatible_keys
        >>> incompatible_keys(torch.nn.Linear(2, 1), {"weight": torch.zeros(1, 2)}).missing_keys
        ['bias']
    """
    if not isinstance(given, Mapping) or MARK in given:
        return _IncompatibleKeys([], [])
    return _IncompatibleKeys(*misfits(module, given))

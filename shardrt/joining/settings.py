"""The settings of optimizers as ranks without inputs need them: the schedulers of those no longer run.

Note [Options follow the active]: a rank that has run out of inputs still steps its shards, with the learning rate that
its own scheduler set last. So it takes over the group options, and what is frozen, from a rank that has inputs,
whenever a roll call shows that they differ.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from shardrt.joining.values import pack, unpack
from shardrt.optim.agreement import comparable
from shardrt.optim.uneven import UnevenOptimizer

_OWN_KEYS = ("params", "param_names")


def describe_settings(optimizers: Sequence[UnevenOptimizer]) -> str:
    """Options and frozen parameters of some optimizers, as text that is the same on ranks that have the same."""
    return json.dumps(
        [
            {
                "groups": [
                    {key: _packed(value) for key, value in group.items() if key not in _OWN_KEYS}
                    for group in optimizer.param_groups
                ],
                "frozen": optimizer.frozen_names(),
            }
            for optimizer in optimizers
        ]
    )


def take_over_settings(optimizers: Sequence[UnevenOptimizer], described: str) -> None:
    """Set all that as it was described on another rank."""
    for optimizer, settings in zip(optimizers, json.loads(described), strict=True):
        for group, options in zip(optimizer.param_groups, settings["groups"], strict=True):
            for key, packed in options.items():
                _take_over(group, key, packed)
        optimizer.set_trained(set(settings["frozen"]))


def _packed(value: Any) -> Any:
    try:
        return pack(value)
    except TypeError:  # a function, say: there is no way to send it, and every rank has its own
        return {"own": comparable(value)}


def _take_over(group: dict[str, Any], key: str, packed: Any) -> None:
    if isinstance(packed, dict) and "own" in packed:
        return
    if key in group and _packed(group[key]) == packed:
        return
    value, held = unpack(packed), group.get(key)
    if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor) and held.shape == value.shape:
        with torch.no_grad():
            held.copy_(value)  # the user may hold it too
    else:
        group[key] = value

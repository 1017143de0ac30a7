"""What one run of the demo is asked to do. No torch here: the command checks its arguments with this."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

from shardrt.errors import ConfigError
from shardrt.registry.nearness import did_you_mean

RECIPES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "adafactor": ("Adafactor", {"lr": 0.03}),
        "adagrad": ("Adagrad", {"lr": 0.02}),
        "adam": ("Adam", {"lr": 3e-3}),
        "adamax": ("Adamax", {"lr": 5e-3}),
        "adamw": ("AdamW", {"lr": 3e-3}),
        "muon": ("Muon", {"lr": 0.02}),
        "nadam": ("NAdam", {"lr": 3e-3}),
        "radam": ("RAdam", {"lr": 3e-3}),
        "rmsprop": ("RMSprop", {"lr": 1e-3}),
        "sgd": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    }
)
"""Name to the class in ``torch.optim`` and the options that suit the demo's model."""


def _is_count(_: Any, field: attrs.Attribute[Any], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{field.name} must be a whole number from 1 up, got {value!r}")


def _is_recipe(_: Any, field: attrs.Attribute[Any], value: object) -> None:
    if value not in RECIPES:
        raise ConfigError(
            f"unknown optimizer {value!r}; the demo has: {', '.join(RECIPES)}{did_you_mean(value, RECIPES)}"
        )


@attrs.frozen(kw_only=True)
class DemoSettings:
    """The arguments of the demo, in a form that travels to the ranks as JSON.

    Example:
        >>> from shardrt.demo.settings import DemoSettings
        >>> DemoSettings(steps=0)
        Traceback (most recent call last):
        shardrt.errors.ConfigError: steps must be a whole number from 1 up, got 0
    """

    ranks: int = attrs.field(default=2, validator=_is_count)
    steps: int = attrs.field(default=60, validator=_is_count)
    batch: int = attrs.field(default=8, validator=_is_count)
    optimizer: str = attrs.field(default="adamw", validator=_is_recipe)
    partitioner: str = "greedy"
    backend: str = "auto"
    schedule: str = "sync"
    bucket_mb: float | None = None
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return attrs.asdict(self)

"""Plain JSON values, checked on the way in: a damaged or foreign file ends in one kind of error that says where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardrt.errors import PlanError


def read_field(data: object, key: str, *, where: str) -> Any:
    """The value of a key that must be there.

    Example:
        >>> from shardrt.plan.reading import read_field
        >>> read_field({"dtype": "float32"}, "dtype", where="parameter")
        'float32'
    """
    if not isinstance(data, Mapping):
        raise PlanError(f"{where} must be a mapping, got {_shown(data)}")
    if key not in data:
        listed = ", ".join(sorted(map(str, data))) or "none"
        raise PlanError(f"{where} has no {key!r}; its keys: {listed}")
    return data[key]


def read_text(data: object, key: str, *, where: str) -> str:
    """A string field."""
    value = read_field(data, key, where=where)
    if not isinstance(value, str):
        raise PlanError(f"{key!r} of {where} must be a string, got {_shown(value)}")
    return value


def read_flag(data: object, key: str, *, where: str) -> bool:
    """A true or false field."""
    value = read_field(data, key, where=where)
    if not isinstance(value, bool):
        raise PlanError(f"{key!r} of {where} must be true or false, got {_shown(value)}")
    return value


def read_count(data: object, key: str, *, where: str, least: int = 0) -> int:
    """A whole number that is not smaller than ``least``.

    Example:
        >>> from shardrt.plan.reading import read_count
        >>> read_count({"world_size": 4}, "world_size", where="partition", least=1)
        4
    """
    value = read_field(data, key, where=where)
    if not is_count(value) or value < least:
        raise PlanError(f"{key!r} of {where} must be a whole number from {least} up, got {_shown(value)}")
    return int(value)


def read_list(data: object, key: str, *, where: str) -> list[Any]:
    """A list field."""
    value = read_field(data, key, where=where)
    if not isinstance(value, (list, tuple)):
        raise PlanError(f"{key!r} of {where} must be a list, got {_shown(value)}")
    return list(value)


def is_count(value: object) -> bool:
    """Whether a value is a whole number that is not negative; JSON's true and false are no numbers."""
    return type(value) is int and value >= 0


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text[:60]}..." if len(text) > 60 else text

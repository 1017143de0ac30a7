"""The tensors in whatever modules take and return: nested containers, dataclasses, mappings of any class."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils import _pytree as pytree


def differentiable(values: Any) -> list[torch.Tensor]:
    """The tensors that gradients go through, each once.

    Example:
        >>> import torch
        >>> from shardrt.sharding.tensors import differentiable
        >>> x = torch.ones(1, requires_grad=True)
        >>> len(differentiable({"x": x, "again": [x], "other": torch.ones(1), "name": "x"}))
        1
    """
    found: dict[int, torch.Tensor] = {}

    def look(value: Any) -> None:
        for leaf in pytree.tree_iter(value):
            if isinstance(leaf, torch.Tensor):
                if leaf.requires_grad:
                    found[id(leaf)] = leaf
            elif _is_dataclass(leaf):
                look([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])
            elif isinstance(leaf, Mapping):
                look(list(leaf.values()))

    look(values)
    return list(found.values())


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """The same values with each tensor changed; containers in which none was stay the objects they are.

    Example:
        >>> import dataclasses, torch
        >>> from shardrt.sharding.tensors import map_tensors
        >>> @dataclasses.dataclass(frozen=True)
        ... class Answer:
        ...     value: torch.Tensor
        ...     name: str
        >>> map_tensors(lambda tensor: tensor + 1, [Answer(torch.zeros(1), "a")])
        [Answer(value=tensor([1.]), name='a')]
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if isinstance(leaf, Mapping):  # before dataclasses: the outputs of Hugging Face's models are both
            return _with_items(leaf, {key: map_tensors(change, item) for key, item in leaf.items()})
        if _is_dataclass(leaf):
            fields = {field.name: getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)}
            return _with_fields(leaf, {name: map_tensors(change, value) for name, value in fields.items()})
        return leaf

    return pytree.tree_map(one, values)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _with_items(given: Mapping[Any, Any], items: Mapping[Any, Any]) -> Any:
    changed = {key: item for key, item in items.items() if _differs(item, given[key])}
    if not changed:
        return given
    if not isinstance(given, MutableMapping):
        return type(given)(items)  # type: ignore[call-arg]
    made = copy.copy(given)
    for key, item in changed.items():
        made[key] = item
    return made


def _with_fields(given: Any, fields: Mapping[str, Any]) -> Any:
    changed = {name: value for name, value in fields.items() if _differs(value, getattr(given, name, None))}
    if not changed:
        return given
    made = copy.copy(given)  # and not the constructor, which may take other arguments, and check or change them
    for name, value in changed.items():
        object.__setattr__(made, name, value)
    return made


def _differs(new: Any, old: Any) -> bool:
    """Whether something in it is another tensor: containers that pytree knows are always made anew."""
    if new is old:
        return False
    return any(one is not other for one, other in zip(pytree.tree_leaves(new), pytree.tree_leaves(old), strict=True))

"""The tensors in whatever modules take and return: nested containers, dataclasses, mappings of any class."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Literal

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.utils import _pytree as pytree

GradientsMode = Literal["all", "any"]


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
    _look_for_differentiable(values, found)
    return list(found.values())


def _look_for_differentiable(values: Any, found: dict[int, torch.Tensor]) -> None:
    # No function inside the other: one that calls itself is a cycle, and would keep activations until Python's garbage
    # is collected.
    for leaf in pytree.tree_iter(values):
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                found[id(leaf)] = leaf
        elif _is_dataclass(leaf):
            _look_for_differentiable([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)], found)
        elif isinstance(leaf, Mapping):
            _look_for_differentiable(list(leaf.values()), found)


def when_gradients_come(tensors: Sequence[torch.Tensor], call: Callable[[Any], None], *, mode: GradientsMode) -> None:
    """Call something in a backward once: when the gradient of any of these is there, or of all.

    Torch's hook for several tensors is a cycle, which keeps a graph until Python's garbage is collected; most often
    there is one tensor, and a plain hook does.

    Example:
        >>> import torch
        >>> from shardrt.sharding.tensors import when_gradients_come
        >>> x = torch.ones(2, requires_grad=True)
        >>> when_gradients_come([x], lambda _: print("here"), mode="all")
        >>> x.sum().backward()
        here
    """
    if len(tensors) == 1:
        tensors[0].register_hook(call)  # type: ignore[no-untyped-call]
    else:
        register_multi_grad_hook(tensors, call, mode=mode)


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

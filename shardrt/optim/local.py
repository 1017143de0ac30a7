"""The user's own optimizer class, at work on this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardrt.optim.flattening import FlatSteps

_OWN_KEYS = ("params", "param_names")
"""What differs between the user's groups and the local ones; everything else is kept equal."""


class LocalOptimizer:
    """An optimizer over shards whose groups mirror the groups the user sees.

    Schedulers write into the user's groups; some optimizers write into their own (a running step size). So values
    travel in before the step and out after it.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        groups: Sequence[tuple[Mapping[str, Any], Sequence[torch.Tensor]]],
        defaults: Mapping[str, Any],
        *,
        joins: bool = False,
    ) -> None:
        """``joins``: shards that lie side by side may be stepped as one, see Note [Flat runs]."""
        filled = [{**options, "params": list(shards)} for options, shards in groups]
        self.inner = construct(optimizer_class, filled, defaults)
        self._step: Callable[..., Any] = step_without_global_hooks(self.inner)
        self._flat = FlatSteps(self.inner) if joins else None

    def add_group(self, options: Mapping[str, Any], shards: Sequence[torch.Tensor]) -> None:
        """A group the user added later; a rank may own nothing of it."""
        self.inner.add_param_group({**options, "params": list(shards)})

    def laid_out_anew(self) -> None:
        """Shards are about to live elsewhere."""
        if self._flat is not None:
            self._flat.forget()

    def step(self, shards: Sequence[torch.nn.Parameter] | None = None) -> None:
        """Step all shards, or only some; the others are not looked at."""
        if self._flat is not None:
            self._flat.step(self._step, shards)
            return
        if shards is None:
            self._step()
            return
        chosen = set(map(id, shards))
        everything = [group["params"] for group in self.inner.param_groups]
        try:
            for group in self.inner.param_groups:
                group["params"] = [param for param in group["params"] if id(param) in chosen]
            self._step()
        finally:
            for group, params in zip(self.inner.param_groups, everything, strict=True):
                group["params"] = params

    def options(self, index: int) -> dict[str, Any]:
        """The options of a group, with the class's defaults filled in."""
        return {key: value for key, value in self.inner.param_groups[index].items() if key not in _OWN_KEYS}

    def take_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Values from the user's groups to the local ones."""
        for local, user in zip(self.inner.param_groups, groups, strict=True):
            for key, value in user.items():
                if key not in _OWN_KEYS:
                    local[key] = value

    def give_options(self, groups: Sequence[dict[str, Any]]) -> None:
        """Values that the optimizer itself changed, back to the user's groups."""
        for local, user in zip(self.inner.param_groups, groups, strict=True):
            for key, value in local.items():
                if key not in _OWN_KEYS and user.get(key) is not value:
                    user[key] = value


def step_without_global_hooks(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The optimizer's step as its author wrote it.

    torch wraps every class's ``step`` with the hooks that are registered for all optimizers and with a profiler
    range. The user's optimizer, around this one, has run them already.
    """
    step = type(optimizer).step
    original = getattr(step, "__wrapped__", None)
    own_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if original is None or not getattr(step, "hooked", False) or own_hooks:
        return optimizer.step
    bound: Callable[..., Any] = original.__get__(optimizer)
    return bound


def construct(
    optimizer_class: type[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """The user's class over some groups, also where it would refuse what it will never step.

    Example:
        >>> import torch
        >>> from shardrt.optim.local import construct
        >>> layer = torch.nn.Linear(2, 2)
        >>> layer.bias.requires_grad_(False)
        Parameter containing:
        ...
        >>> muon = construct(torch.optim.Muon, [{"params": [layer.weight, layer.bias]}], {"lr": 0.1})
        >>> len(muon.param_groups[0]["params"])
        2
    """
    try:
        return optimizer_class([dict(group) for group in groups], **defaults)
    except Exception:
        made = _without_frozen(optimizer_class, groups, defaults)
        if made is None:
            raise
        return made


def _without_frozen(
    optimizer_class: type[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> torch.optim.Optimizer | None:
    """Some classes look at all parameters (Muon takes matrices only) or at the first of each group, of which this rank
    may own nothing. Frozen ones are shown to none, and where nothing is left an empty one stands in, which never gets a
    gradient. None if the class refuses that too: then its first error is the right one.
    """
    shown = [[param for param in group["params"] if param.requires_grad] for group in groups]
    if all(group["params"] and len(group["params"]) == len(some) for group, some in zip(groups, shown, strict=True)):
        return None
    filled = [
        {**group, "params": some or [torch.nn.Parameter(torch.empty(0, 0))]}
        for group, some in zip(groups, shown, strict=True)
    ]
    try:
        made = optimizer_class(filled, **defaults)
    except Exception:
        return None
    for group, given in zip(made.param_groups, groups, strict=True):
        if given["params"]:  # one that is thawed later is stepped, or refused by the class then
            group["params"] = list(given["params"])
    return made

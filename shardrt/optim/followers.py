"""Whoever follows what an optimizer does, and how to be called without being kept alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

if TYPE_CHECKING:
    from shardrt.optim.engine import BucketEngine


@attrs.define(kw_only=True, eq=False)
class Followers:
    """What a sharded module wants to hear of its optimizer."""

    rebuilding: Callable[[], None] = lambda: None
    """Before buckets are laid out anew: parameters that can go must be away."""
    rebuilt: Callable[[BucketEngine], None] = lambda engine: None
    """Afterwards."""
    updating: Callable[[], None] = lambda: None
    """Shards are about to get new values."""
    renewed: Callable[[], None] = lambda: None
    """Shards have new values: whole parameters that were gathered before are old."""
    gather: Callable[[int], None] = lambda unit: None
    """Other ranks gather a unit's parameters: take part in it."""
    reducing: Callable[[], None] = lambda: None
    """A synchronised backward has filled its first bucket."""
    reduced: Callable[[], None] = lambda: None
    """A synchronised backward has ended."""
    steps_elsewhere: bool = False
    """Whether reduced gradients are handed to somebody who steps, so that nothing is under way when backward ends."""
    summoned: bool = False
    """Whether whole parameters are lent to somebody outside forward and backward."""


def call_if_alive(method: weakref.WeakMethod[Any], *arguments: Any) -> Any:
    """Call a method of an object that may be gone; None if it is."""
    alive = method()
    return None if alive is None else alive(*arguments)


def remove_hooks(hooks: Sequence[torch.utils.hooks.RemovableHandle]) -> None:
    """Take hooks off what they hang on."""
    for hook in hooks:
        hook.remove()

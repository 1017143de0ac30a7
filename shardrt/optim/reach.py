"""How far an optimizer's update looks: at one element, at one parameter, or at the whole model.

Only an elementwise optimizer may be handed slices of a parameter. One that nobody vouches for gets whole parameters.
"""

from __future__ import annotations

from enum import Enum

import torch

from shardrt.errors import UnsupportedError


class Reach(Enum):
    """What the new value of one element depends on, besides hyperparameters and the step count."""

    ELEMENT = "element"
    PARAMETER = "parameter"
    MODEL = "model"


_ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)

_WHOLE_MODEL_NAMES = frozenset(
    {"LBFGS", "Prodigy", "DAdaptAdam", "DAdaptAdaGrad", "DAdaptAdan", "DAdaptLion", "DAdaptSGD"}
)
"""Their step size or direction comes from sums over all parameters; a shard of them would silently differ."""


def reach_of(optimizer_class: type[torch.optim.Optimizer], elementwise: bool | None = None) -> Reach:
    """The reach of an optimizer class.

    ``elementwise`` is the user's word. An author's word is the class attribute ``shardrt_elementwise = True``, which
    counts for that very class: a subclass may well change the update.

    Example:
        >>> import torch
        >>> from shardrt.optim.reach import reach_of
        >>> reach_of(torch.optim.AdamW).value, reach_of(torch.optim.Adafactor).value
        ('element', 'parameter')
    """
    if any(base.__name__ in _WHOLE_MODEL_NAMES for base in optimizer_class.__mro__):
        return Reach.MODEL
    if elementwise is None:
        elementwise = optimizer_class in _ELEMENTWISE or vars(optimizer_class).get("shardrt_elementwise") is True
    return Reach.ELEMENT if elementwise else Reach.PARAMETER


def may_be_joined(optimizer_class: type[torch.optim.Optimizer], reach: Reach) -> bool:
    """Whether several parameters may be handed to an optimizer as one: see Note [Flat runs].

    Somebody's word that an update is elementwise is not enough, since it may still look at a parameter's shape (no
    weight decay for vectors).

    Example:
        >>> import torch
        >>> from shardrt.optim.reach import Reach, may_be_joined
        >>> may_be_joined(torch.optim.AdamW, Reach.ELEMENT), may_be_joined(torch.optim.Adafactor, Reach.PARAMETER)
        (True, False)
    """
    return reach is Reach.ELEMENT and optimizer_class in _ELEMENTWISE


def reach_called(name: str) -> Reach:
    """The reach of an optimizer class that is known by its name alone, with its module or without.

    Nothing is imported: a name that was found in a file must not run code. What is not a class of torch's is not known.

    Example:
        >>> from shardrt.optim.reach import reach_called
        >>> [reach_called(name).value for name in ("torch.optim.adamw.AdamW", "lion_pytorch.Lion", "LBFGS")]
        ['element', 'parameter', 'model']
    """
    module, _, short = name.rpartition(".")
    if short in _WHOLE_MODEL_NAMES:
        return Reach.MODEL
    known = any(short == one.__qualname__ and module in (one.__module__, "torch.optim") for one in _ELEMENTWISE)
    return Reach.ELEMENT if known else Reach.PARAMETER


def check_shardable(optimizer_class: type[torch.optim.Optimizer], reach: Reach) -> None:
    """Refuse, before anything is built, an optimizer that cannot be right on a part of the parameters."""
    if reach is Reach.MODEL:
        raise UnsupportedError(
            f"{optimizer_class.__name__} computes each update from the whole model, so its state cannot be sharded; "
            "use it on one rank, or choose an optimizer that treats parameters independently"
        )
    if issubclass(optimizer_class, torch.optim.SparseAdam):
        raise UnsupportedError(
            "SparseAdam updates from sparse gradients, which flat buffers cannot hold; "
            "use Adam with dense gradients (torch.nn.Embedding(sparse=False))"
        )

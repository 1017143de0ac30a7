"""Large shards are stepped piece by piece.

Note [Pieces for the cache]: torch's optimizers go over a whole tensor with one operation after the other. Where that
tensor, its gradient and its state are larger than a processor's cache, each operation fetches them from memory again:
of AdamW's time on a CPU that is nearly half. Where the update looks at one element at a time a large shard may as
well be handed over in pieces that stay in the cache from the first operation to the last. Pieces are views, of the
shard, its gradient and its state alike, so nothing is copied; what an optimizer counts per parameter (``step``) each
piece has for itself, and the shard gets it back. A shard's first step, in which its state is made, is taken in one
piece, and so is every one whose state is not as expected. The same bits come out, as
``tests/unit/test_cut_shards.py`` shows.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

PIECE = 1 << 17
"""Elements: with gradient, two kinds of state and what the update computes on its way some megabytes."""

State = MutableMapping[torch.Tensor, dict[str, Any]]


def is_large(shard: torch.Tensor) -> bool:
    """Whether a shard is worth cutting, and can be.

    Example:
        >>> import torch
        >>> from shardrt.optim.cutting import PIECE, is_large
        >>> is_large(torch.nn.Parameter(torch.empty(2 * PIECE))), is_large(torch.nn.Parameter(torch.empty(3)))
        (True, False)
    """
    return (
        shard.numel() >= 2 * PIECE
        and shard.device.type == "cpu"
        and type(shard) is torch.nn.Parameter
        and shard.is_contiguous()
    )


def may_cut(group: Mapping[str, Any]) -> bool:
    """Fused kernels read everything once anyway, and ``foreach`` goes over all pieces with each operation."""
    return not (group.get("fused") or group.get("foreach") or group.get("differentiable"))


class CutShard:
    """A shard and its pieces. See Note [Pieces for the cache]."""

    def __init__(self, shard: torch.nn.Parameter) -> None:
        self.shard = shard
        self.pieces = [torch.nn.Parameter(piece) for piece in torch.split(shard.detach().view(-1), PIECE)]
        self._whole: dict[str, Any] = {}
        """The shard's state as it was cut last."""
        self._states: list[dict[str, Any]] = []
        """What each piece got of it: views, which stay good, and numbers, which are taken anew before each step."""

    def cut(self, state: State) -> bool:
        """Let the pieces stand for the shard in the optimizer's state, if they can in this step."""
        whole = state.get(self.shard)
        if not whole or not self._cut_state(whole) or not self._cut_gradient():
            return False
        for piece, own in zip(self.pieces, self._states, strict=True):
            state[piece] = dict(own)
        return True

    def join(self, state: State) -> None:
        """Leave the shard's state as if it had been stepped in one piece."""
        after = [state.pop(piece) for piece in self.pieces]
        for piece in self.pieces:
            piece.grad = None  # the gradient may go before the next one comes
        whole = state[self.shard]
        for key in [key for key in whole if key not in after[0]]:
            del whole[key]
        for key, first in after[0].items():
            parts = [one[key] for one in after]
            kept = whole.get(key)
            if not isinstance(first, torch.Tensor):
                whole[key] = first
            elif not isinstance(kept, torch.Tensor):
                whole[key] = torch.cat(parts).view(self.shard.shape) if first.dim() else first.clone()
            elif not first.dim():
                kept.copy_(first)
            elif any(part is not given[key] for part, given in zip(parts, self._states, strict=True)):
                torch.cat(parts, out=kept.view(-1))

    def _cut_gradient(self) -> bool:
        gradient = self.shard.grad
        if gradient is None or gradient.dtype != self.shard.dtype or not gradient.is_contiguous():
            return False
        for piece, part in zip(self.pieces, torch.split(gradient.detach().view(-1), PIECE), strict=True):
            piece.grad = part
        return True

    def _cut_state(self, whole: dict[str, Any]) -> bool:
        large = [self._is_per_element(value) for value in whole.values()]
        if not any(large):  # nothing that would be fetched again
            return False
        if not all(is_large or _is_one_number(one) for is_large, one in zip(large, whole.values(), strict=True)):
            return False
        known = len(self._states) == len(self.pieces) and whole.keys() == self._whole.keys()
        if not known:
            self._states = [{} for _ in self.pieces]
        for key, value in whole.items():
            if known and value is self._whole[key] and self._is_per_element(value):
                continue
            if self._is_per_element(value):
                parts: list[Any] = list(torch.split(value.detach().view(-1), PIECE))
            elif isinstance(value, torch.Tensor):
                parts = list(value.detach().expand(len(self.pieces)).clone().unbind())
            else:
                parts = [value] * len(self.pieces)
            for own, part in zip(self._states, parts, strict=True):
                own[key] = part
        self._whole = dict(whole)
        return True

    def _is_per_element(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == self.shard.shape and value.is_contiguous()


def _is_one_number(value: Any) -> bool:
    return isinstance(value, int | float | None) or (isinstance(value, torch.Tensor) and not value.dim())

"""Which calls of units still wait for their backward, so that one knows when a unit gets no more gradients.

Gradients of parameters come once, after the last of several calls of their unit. By then autograd has added them up,
since it does that before anything that a call was given. Only what no operation has made (a leaf) may come at the same
time: such calls are not counted, and nothing is said of their units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardrt.optim.backward import BackwardToken


class Outstanding:
    """Calls by the number of their unit.

    Example:
        >>> import torch
        >>> from shardrt.sharding.outstanding import Outstanding
        >>> calls, made = Outstanding(1), torch.ones(1, requires_grad=True) * 2
        >>> calls.begin(0, [made])
        >>> calls.begin(0, [made])
        >>> calls.end(0), calls.end(0), calls.end(0)
        (False, True, False)
    """

    def __init__(self, units: int) -> None:
        self._counts = [0] * units

    def begin(self, unit: int, inputs: Sequence[torch.Tensor]) -> None:
        """A unit is called, and its backward will end with these."""
        if all(tensor.grad_fn is not None for tensor in inputs):
            self._counts[unit] += 1

    def end(self, unit: int) -> bool:
        """The backward of a call is over; whether it was the last that is known of."""
        self._counts[unit] -= 1
        return self._counts[unit] == 0

    def forget(self) -> None:
        """Parameters have changed: calls that never came to their backward never will."""
        self._counts = [0] * len(self._counts)


class UnitBackward(BackwardToken):
    """A backward, maybe inside another, and the units it has begun with and not finished."""

    def __init__(self, ended: Callable[[BackwardToken], None]) -> None:
        super().__init__(ended)
        self.units: set[int] = set()

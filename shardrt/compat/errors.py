"""Errors of ours that are also of the kind torch raises in the same place: code written for torch catches them."""

from __future__ import annotations

from shardrt.errors import ConfigError, OptimizerError, StateError


class ParametersError(ConfigError, TypeError):
    """What was passed as parameters cannot be optimized. torch raises TypeError or ValueError; this is both.

    Example:
        >>> import torch
        >>> from shardrt.compat import ZeroRedundancyOptimizer
        >>> try:
        ...     ZeroRedundancyOptimizer(torch.zeros(2), torch.optim.SGD, lr=0.1)
        ... except TypeError as error:
        ...     print(error)
        params must be an iterable of parameters, got one tensor; pass [tensor]
    """


class OverlapError(OptimizerError, RuntimeError):
    """An optimizer with ``overlap_with_ddp=True`` was asked for what it cannot do, or cannot do yet."""


class NotConsolidatedError(StateError, RuntimeError):
    """A state dict was asked for on a rank that it has not been brought to."""

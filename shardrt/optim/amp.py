"""torch.amp.GradScaler over sharded gradients: one scale, one decision to skip, on all ranks.

Note [Wrapping GradScaler]: a scaler looks for infinities in ``p.grad``, which here is this rank's own gradient, and
keeps what it found in itself: ranks would skip different steps and go on with different scales. It has no way for an
optimizer to say otherwise, so the one method in which it unscales and looks is wrapped, once, for all scalers. For
optimizers that are not ours it does what it did.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from shardrt.optim.managed import ManagedOptimizer

_METHOD = "_unscale_grads_"
_TAUGHT = "_shardrt_taught"


class ScaledOptimizer(ManagedOptimizer):
    """An optimizer that finds out about infinities together with its peers."""

    def unscale(self, inverse_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool) -> bool:
        """Unscale the reduced gradients and add to ``found_inf`` if one anywhere is not finite.

        Says False if the gradients are the scaler's to look at as they are: reduced, and whole on every rank.
        """
        raise NotImplementedError


def teach_grad_scaler() -> None:
    """Let torch's GradScaler ask our optimizers; doing it again changes nothing."""
    original = getattr(GradScaler, _METHOD)
    if getattr(original, _TAUGHT, False):
        return

    @functools.wraps(original)
    def unscale(
        scaler: GradScaler,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> Any:
        if isinstance(optimizer, ScaledOptimizer) and optimizer.unscale(inv_scale, found_inf, allow_fp16):
            return {found_inf.device: found_inf}
        return original(scaler, optimizer, inv_scale, found_inf, allow_fp16)

    setattr(unscale, _TAUGHT, True)
    setattr(GradScaler, _METHOD, unscale)

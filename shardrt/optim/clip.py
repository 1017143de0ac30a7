"""The norm of the whole model's gradient when every rank has only its own shards of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardrt.errors import OptimizerError
from shardrt.protocols import Communicator


def clip_gradients(
    counted: Sequence[torch.Tensor],
    scaled: Sequence[torch.Tensor],
    communicator: Communicator,
    *,
    device: str,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Scale gradients in place; see :meth:`shardrt.Runtime.clip_grad_norm_`.

    ``counted`` are this rank's disjoint part of the gradient, ``scaled`` the tensors to scale on this rank.
    """
    norm = global_norm(counted, communicator, norm_type, device)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise OptimizerError(
            f"the gradient norm of order {norm_type:g} over all ranks is {norm.item()}, so it cannot be clipped; "
            "pass error_if_nonfinite=False to scale by it anyway"
        )
    # The small constant and the clamp are torch.nn.utils.clip_grad_norm_'s: the same scale from the same norm.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for gradient in scaled:
        by_kind.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for (_, where), same in by_kind.items():
        torch._foreach_mul_(same, scale.to(where))
    return norm


def global_norm(
    gradients: Sequence[torch.Tensor], communicator: Communicator, norm_type: float, device_type: str
) -> torch.Tensor:
    """The norm over the shards of all ranks; the same bits on every rank."""
    device = gradients[0].device if gradients else torch.device(device_type)
    order = float(norm_type)
    local = torch.zeros(1, dtype=torch.float32, device=device)
    if gradients:
        norms = torch.stack([n.to(device, torch.float32) for n in torch._foreach_norm(list(gradients), order)])
        local = torch.linalg.vector_norm(norms, order).reshape(1)
    if math.isinf(order):
        communicator.all_reduce(local, op="max").wait()
        return local[0]
    powered = local.pow(order)
    communicator.all_reduce(powered).wait()
    return powered.pow(1.0 / order)[0]

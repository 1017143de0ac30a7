"""The norm of the whole model's gradient when every rank has only its own shards of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardrt.errors import ConfigError, OptimizerError
from shardrt.optim.managed import ManagedOptimizer
from shardrt.protocols import Communicator


@torch.no_grad()
def clip_by_norm(
    target: object,
    optimizers: Sequence[ManagedOptimizer],
    communicator: Communicator,
    *,
    device_type: str,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """See :meth:`shardrt.Runtime.clip_grad_norm_`; ``optimizers`` are all those of the runtime."""
    chosen, wanted = covering(target, optimizers)
    found = [optimizer.reduced_gradients(wanted) for optimizer in chosen]
    norm = global_norm([shard for shards, _ in found for shard in shards], communicator, norm_type, device_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise OptimizerError(
            f"the gradient norm of order {norm_type:g} over all ranks is {norm.item()}, so it cannot be clipped; "
            "pass error_if_nonfinite=False to scale by it anyway"
        )
    # The small constant and the clamp are torch.nn.utils.clip_grad_norm_'s: the same scale from the same norm.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for gradient in (gradient for _, scaled in found for gradient in scaled):
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


def covering(
    target: object, optimizers: Sequence[ManagedOptimizer]
) -> tuple[Sequence[ManagedOptimizer], set[torch.Tensor] | None]:
    """The optimizers that train a module's parameters and those parameters, or one optimizer and all it trains."""
    if isinstance(target, ManagedOptimizer):
        return [target], None
    if not isinstance(target, torch.nn.Module):
        raise ConfigError(f"expected a module or an optimizer of this runtime, got a {type(target).__name__}")
    wanted: set[torch.Tensor] = set(target.parameters())
    trained = {optimizer: wanted & optimizer.trained() for optimizer in optimizers}
    covered = set().union(*trained.values()) if trained else set()
    for name, param in target.named_parameters():
        if param.grad is not None and param not in covered:
            raise OptimizerError(
                f"parameter {name!r} of the module has a gradient but no optimizer of this runtime trains it; "
                "pass the optimizer instead of the module to clip what it trains"
            )
    return [optimizer for optimizer, params in trained.items() if params], wanted

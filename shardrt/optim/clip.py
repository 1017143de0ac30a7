"""The norm of the whole model's gradient when every rank has only its own shards of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from shardrt.errors import ConfigError, HandshakeError, OptimizerError
from shardrt.optim.managed import ManagedOptimizer
from shardrt.protocols import Communicator

Covered = list[tuple[ManagedOptimizer, set[torch.Tensor] | None]]
"""Optimizers, each with the parameters that are meant, or None for all that it trains."""


@torch.no_grad()
def clip_by_norm(
    covered: Covered,
    communicator: Communicator,
    *,
    device_type: str,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """See :meth:`shardrt.Runtime.clip_grad_norm_`; ``covered`` is what :func:`covering` found."""
    numbers = {"max_norm": max_norm, "norm_type": norm_type}
    _check_numbers(numbers)
    found = [optimizer.reduced_gradients(wanted) for optimizer, wanted in covered]
    _check_same_everywhere(communicator, device_type, numbers)
    # Of shards that several ranks have, each brings its part.
    weighed = [
        (shard, 1.0 / optimizer.replica_count)
        for (optimizer, _), (shards, _) in zip(covered, found, strict=True)
        for shard in shards
    ]
    norm = global_norm(weighed, communicator, norm_type, device_type)
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
    gradients: Sequence[tuple[torch.Tensor, float]], communicator: Communicator, norm_type: float, device_type: str
) -> torch.Tensor:
    """The norm over the shards of all ranks, each with its weight; the same bits on every rank."""
    device = gradients[0][0].device if gradients else torch.device(device_type)
    order = float(norm_type)
    local = torch.zeros(1, dtype=torch.float32, device=device)
    if gradients:
        tensors, weights = zip(*gradients, strict=True)
        norms = torch.stack([n.to(device, torch.float32) for n in torch._foreach_norm(list(tensors), order)])
        if not math.isinf(order) and any(weight != 1.0 for weight in weights):
            norms = norms * torch.tensor(weights, device=device).pow(1.0 / order)
        local = torch.linalg.vector_norm(norms, order).reshape(1)
    if math.isinf(order):
        communicator.all_reduce(local, op="max").wait()
        return local[0]
    powered = local.pow(order)
    communicator.all_reduce(powered).wait()
    return powered.pow(1.0 / order)[0]


@torch.no_grad()
def clip_by_value(
    covered: Covered,
    communicator: Communicator,
    *,
    device_type: str,
    clip_value: float,
) -> None:
    """See :meth:`shardrt.Runtime.clip_grad_value_`; ``covered`` is what :func:`covering` found."""
    numbers = {"clip_value": clip_value}
    _check_numbers(numbers)
    found = [optimizer.reduced_gradients(wanted) for optimizer, wanted in covered]
    _check_same_everywhere(communicator, device_type, numbers)
    for _, scaled in found:
        for gradient in scaled:
            gradient.clamp_(-clip_value, clip_value)


def _check_numbers(numbers: Mapping[str, object]) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigError(f"{name}={value!r} is not possible; give a number above 0 (norm_type may be infinite)")


def _check_same_everywhere(communicator: Communicator, device_type: str, numbers: Mapping[str, float]) -> None:
    """Ranks that clip differently would each give their shards another length."""
    mine = [float(value) for value in numbers.values()]
    largest = torch.tensor([*mine, *(-value for value in mine)], dtype=torch.float32, device=device_type)
    communicator.all_reduce(largest, op="max").wait()
    highest, lowest = largest[: len(mine)].tolist(), (-largest[len(mine) :]).tolist()
    for (name, value), high, low in zip(numbers.items(), highest, lowest, strict=True):
        if high != low:
            raise HandshakeError(
                f"ranks clip with different {name}: between {low:g} and {high:g}; rank {communicator.rank} has "
                f"{value:g}; fix: pass the same on every rank"
            )


def covering(target: object, optimizers: Sequence[ManagedOptimizer]) -> Covered:
    """The optimizers that train a module's parameters, each with those of them that no newer one has.

    For an optimizer: that one, with all that it trains.
    """
    if isinstance(target, ManagedOptimizer):
        return [(target, None)]
    if not isinstance(target, torch.nn.Module):
        raise ConfigError(f"expected a module or an optimizer of this runtime, got a {type(target).__name__}")
    left: set[torch.Tensor] = set(target.parameters())
    found: Covered = []
    for optimizer in reversed(optimizers):
        wanted = left & optimizer.trained()
        left -= wanted
        if wanted:
            found.insert(0, (optimizer, wanted))
    if not found and any(True for _ in target.parameters()):
        raise ConfigError(
            "no optimizer of this runtime trains any parameter of this module; pass the module that is trained (not a "
            "copy of it), or the optimizer"
        )
    for name, param in target.named_parameters():
        if param.grad is not None and param in left:
            raise OptimizerError(
                f"parameter {name!r} of the module has a gradient but no optimizer of this runtime trains it; "
                "pass the optimizer instead of the module to clip what it trains"
            )
    return found

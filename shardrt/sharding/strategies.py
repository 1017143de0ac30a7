"""How much is sharded: names, torch's own members, and what each means for the buffers."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from shardrt.errors import ConfigError
from shardrt.optim.residence import RESIDENT, Residence
from shardrt.registry.nearness import did_you_mean


@attrs.frozen(kw_only=True)
class Strategy:
    """One way to divide a model among ranks.

    Example:
        >>> from shardrt.sharding.strategies import strategy_called
        >>> strategy_called("full_shard").residence.params
        False
    """

    name: str
    summary: str
    residence: Residence = RESIDENT
    shares: Literal["all", "host", "none"] = "all"
    """With whom a rank divides state: all ranks, those of its host (or of a chosen group), or nobody."""


STRATEGIES = {
    one.name: one
    for one in (
        Strategy(name="no_shard", summary="every rank has everything, as under DDP", shares="none"),
        Strategy(name="shard_optim", summary="optimizer state is sharded (ZeRO-1)"),
        Strategy(
            name="shard_grad_op",
            summary="optimizer state and gradients are sharded (ZeRO-2)",
            residence=Residence(gradients=False),
        ),
        Strategy(
            name="full_shard",
            summary="optimizer state, gradients and parameters are sharded (ZeRO-3)",
            residence=Residence(params=False, gradients=False),
        ),
        Strategy(
            name="hybrid_shard",
            summary="as full_shard inside a host or a chosen group of ranks, replicated across",
            residence=Residence(params=False, gradients=False),
            shares="host",
        ),
        Strategy(
            name="hybrid_shard_zero2",
            summary="as shard_grad_op inside a host or a chosen group of ranks, replicated across",
            residence=Residence(gradients=False),
            shares="host",
        ),
    )
}

_TORCH_NAMES = {
    "NO_SHARD": "no_shard",
    "SHARD_GRAD_OP": "shard_grad_op",
    "FULL_SHARD": "full_shard",
    "HYBRID_SHARD": "hybrid_shard",
    "_HYBRID_SHARD_ZERO2": "hybrid_shard_zero2",
}


def offloads(given: Any) -> bool:
    """Whether shards live in the CPU's memory: a flag, torch's ``CPUOffload`` or ``CPUOffloadPolicy``.

    Example:
        >>> from torch.distributed.fsdp import CPUOffload
        >>> from shardrt.sharding.strategies import offloads
        >>> offloads(CPUOffload(offload_params=True)), offloads(None)
        (True, False)
    """
    if given is None or isinstance(given, bool):
        return bool(given)
    kind = type(given).__name__
    if type(given).__module__.startswith("torch.") and kind == "CPUOffload":
        return bool(given.offload_params)
    if type(given).__module__.startswith("torch.") and kind in ("CPUOffloadPolicy", "OffloadPolicy"):
        return kind == "CPUOffloadPolicy"
    raise ConfigError(f"offload={given!r} is not possible; give True, False, or torch's CPUOffload(offload_params=...)")


def pins(given: Any) -> bool:
    """Whether the CPU's memory is locked for an accelerator's copies: as torch's ``CPUOffloadPolicy`` says.

    Example:
        >>> from torch.distributed.fsdp import CPUOffloadPolicy
        >>> from shardrt.sharding.strategies import pins
        >>> pins(CPUOffloadPolicy()), pins(CPUOffloadPolicy(pin_memory=False)), pins(True)
        (True, False, False)
    """
    return bool(getattr(given, "pin_memory", False))


def strategy_called(given: Any) -> Strategy:
    """A strategy by its name, or by a member of torch's ``ShardingStrategy``.

    Example:
        >>> from torch.distributed.fsdp import ShardingStrategy
        >>> from shardrt.sharding.strategies import strategy_called
        >>> strategy_called(ShardingStrategy.SHARD_GRAD_OP).name
        'shard_grad_op'
    """
    name = given
    if type(given).__name__ == "ShardingStrategy" and type(given).__module__.startswith("torch."):
        name = _TORCH_NAMES[given.name]
    if isinstance(given, Strategy):
        return given
    if not isinstance(name, str) or name not in STRATEGIES:
        raise ConfigError(
            f"unknown strategy {given!r}; there are: {', '.join(STRATEGIES)}{did_you_mean(name, STRATEGIES)}"
        )
    return STRATEGIES[name]

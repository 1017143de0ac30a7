"""A sharded module and its unsharded twin, side by side on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import shardrt
from tests.ranks.twins import OPTIMIZERS, average_backward, batch, largest_difference, twins
from tests.ranks.zoo import ZOO

STRATEGIES = ("shard_optim", "shard_grad_op", "full_shard")
EVERY_STRATEGY = ("no_shard", *STRATEGIES, "hybrid_shard", "hybrid_shard_zero2")


def tolerance(name: str, strategy: str, optimizer: str) -> float:
    """How far a model of the zoo may be from its twin. Nearly always not at all."""
    if name == "convolutions" and optimizer != "muon":
        return 5e-6  # which kernel torch takes for a convolution depends on where weights lie in memory
    if name == "mixed dtypes" and strategy != "no_shard" and optimizer.startswith("sgd"):
        # Of a bfloat16 tensor torch computes the last elements, those that fill no vector, with other roundings, and a
        # parameter that is cut has other last elements: one unit in the last place.
        return 2.0**-8
    return 0.0


def options_of(strategy: str, world_size: int, spread: int = 0) -> dict[str, Any]:
    """What ``rt.shard`` is given. Where ranks cannot be divided evenly, hybrid groups are single ranks or all ranks, by
    turns."""
    if not strategy.startswith("hybrid"):
        return {"strategy": strategy}
    if world_size % 2 == 0 and world_size > 2:
        return {"strategy": strategy, "shard_size": 2}
    alone = (world_size + spread + (strategy == "hybrid_shard")) % 2
    return {"strategy": strategy, "shard_size": 1 if alone else world_size}


def only_matrices(build: Callable[[], torch.nn.Module]) -> Callable[[], torch.nn.Module]:
    """The same model with nothing trained but matrices, which is what Muon takes."""

    def built() -> torch.nn.Module:
        model = build()
        for param in model.parameters():
            param.requires_grad_(param.requires_grad and param.dim() == 2)
        return model

    return built


def model_for(name: str, optimizer: str) -> tuple[Callable[[], torch.nn.Module], Any]:
    """How to build a model of the zoo for an optimizer, and its units."""
    build, units = ZOO[name]
    return (only_matrices(build) if optimizer == "muon" else build), units


def compare_sharded(
    name: str, strategy: str, optimizer: str = "adamw_foreach", steps: int = 30, **options: Any
) -> dict[str, Any]:
    """Train both twins and tell the largest difference of any parameter."""
    runtime = options.pop("runtime", {})
    return compare_ways(name, {"only": {"strategy": strategy, **options}}, optimizer, steps, runtime)["only"]


def compare_ways(
    name: str,
    ways: Mapping[str, Mapping[str, Any]],
    optimizer: str = "adamw_foreach",
    steps: int = 30,
    runtime: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Train the model in several ways (options of ``rt.shard``) and the twin; tell the largest differences.

    The twin adds gradients in the order in which the strategy does, which hybrid strategies do by groups: where a
    gradient is zero up to rounding (that of the keys' bias in attention), any other order makes Adam step by noise.
    """
    build, units = model_for(name, optimizer)
    optimizer_class, defaults = OPTIMIZERS[optimizer]
    world_size = torch.distributed.get_world_size()
    trained: dict[int, torch.nn.Module] = {}
    found = {}
    for way, options in ways.items():
        group_size = options.get("shard_size") or world_size
        if group_size == 1:  # the same sum
            group_size = world_size
        if group_size not in trained:
            trained[group_size] = _train_twin(build, optimizer, steps, world_size, group_size)
        twin = trained[group_size]
        model, fresh = twins(build)
        with shardrt.Runtime(timeout=30, **(runtime or {})) as rt:
            model, opt = rt.shard(model, optimizer_class, units=units, **options, **defaults)
            for step in range(steps):
                model(batch(step, rt.rank)).pow(2).mean().backward()
                opt.step()
                opt.zero_grad()
            with rt.summon_full_params(model):
                difference = largest_difference(model.parameters(), twin.parameters())
            moved = largest_difference(twin.parameters(), fresh.parameters())
            found[way] = {"difference": difference, "moved": moved}
    return found


def _train_twin(
    build: Callable[[], torch.nn.Module], optimizer: str, steps: int, world_size: int, group_size: int
) -> torch.nn.Module:
    _, twin = twins(build)
    optimizer_class, defaults = OPTIMIZERS[optimizer]
    plain = optimizer_class([param for param in twin.parameters() if param.requires_grad], **defaults)
    for step in range(steps):
        average_backward(twin, lambda rank: twin(batch(step, rank)).pow(2).mean(), world_size, group_size)  # noqa: B023
        plain.step()
        plain.zero_grad()
    return twin

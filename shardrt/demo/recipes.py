"""From the name of an optimizer to one or two optimizers over a model, sharded or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from shardrt.choosing import call_factory
from shardrt.comm.availability import require_available
from shardrt.config import Choice, RuntimeConfig
from shardrt.demo.model import ByteTransformer
from shardrt.demo.settings import RECIPES, DemoSettings
from shardrt.optim.params import read_groups
from shardrt.optim.planner import Planner
from shardrt.optim.reach import reach_of
from shardrt.plan import Plan
from shardrt.registry import load_registry

NamedParams = list[tuple[str, nn.Parameter]]


class MakeOptimizer(Protocol):
    """Builds an optimizer of a class: ``rt.optimizer`` for the sharded run, the class itself for the other."""

    def __call__(self, params: NamedParams, optimizer_class: type[torch.optim.Optimizer], **options: Any) -> Any:
        """The optimizer."""
        ...


def plain(params: NamedParams, optimizer_class: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    """The optimizer as torch makes it."""
    return optimizer_class(params, **options)


def parts_of(model: nn.Module, name: str) -> list[tuple[NamedParams, type[torch.optim.Optimizer], Mapping[str, Any]]]:
    """Which parameters go to which optimizer class with which options.

    Muon is for the matrices inside the blocks; the rest is AdamW's, as its authors do it.

    Example:
        >>> from shardrt.demo.model import ByteTransformer
        >>> from shardrt.demo.recipes import parts_of
        >>> [(len(params), kind.__name__) for params, kind, _ in parts_of(ByteTransformer(), "muon")]
        [(16, 'Muon'), (36, 'AdamW')]
    """
    params = list(model.named_parameters())
    classes = {known: getattr(torch.optim, class_name) for known, (class_name, _) in RECIPES.items()}
    if name != "muon":
        return [(params, classes[name], RECIPES[name][1])]
    matrices = {key for key, param in params if "blocks." in key and param.dim() == 2}
    inner = [(key, param) for key, param in params if key in matrices]
    rest = [(key, param) for key, param in params if key not in matrices]
    return [(inner, classes["muon"], RECIPES["muon"][1]), (rest, classes["adamw"], RECIPES["adamw"][1])]


def build_optimizers(model: nn.Module, name: str, make: MakeOptimizer) -> list[Any]:
    """All optimizers that together train the model."""
    return [make(params, optimizer_class, **options) for params, optimizer_class, options in parts_of(model, name)]


def check_settings(settings: DemoSettings) -> list[Plan]:
    """Refuse what cannot work before any rank is started, by planning as the ranks will; returns the plans.

    Example:
        >>> from shardrt.demo.recipes import check_settings
        >>> from shardrt.demo.settings import DemoSettings
        >>> [plan] = check_settings(DemoSettings(ranks=4, partitioner="flat"))
        >>> round(plan.imbalance, 2)
        1.0
    """
    registry = load_registry()
    limits = RuntimeConfig(bucket_mb=settings.bucket_mb)
    choice = Choice.parse("partitioner", settings.partitioner)
    partitioner = call_factory("partitioner", choice, registry.partitioners.get(choice.name).factory)
    registry.schedules.get(settings.schedule)
    if settings.backend != "auto":
        require_available(registry.backends.get("cpu", settings.backend))
    return [
        Planner(
            partitioner=partitioner,
            world_size=settings.ranks,
            bucket_bytes=None if limits.bucket_mb is None else int(limits.bucket_mb * 2**20),
            optimizer_class=optimizer_class,
            reach=reach_of(optimizer_class),
        ).plan([param.spec() for group in read_groups(params) for param in group.params])
        for params, optimizer_class, _ in parts_of(ByteTransformer(), settings.optimizer)
    ]

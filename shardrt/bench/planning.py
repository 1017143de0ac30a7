"""How long planning takes, beside the planning of torch's ZeroRedundancyOptimizer in the same process.

What is timed: for each installed partitioner, ``partition(request)`` on parameter descriptions, from the request to the
finished :class:`~shardrt.Partition`; for torch, ``ZeroRedundancyOptimizer._partition_parameters`` on parameters of the
same shapes on the meta device, from the list to the parameter groups of every rank. Torch's method belongs to an
optimizer that needs a process group to be made; it is called on an instance that was never initialised and has just the
three attributes the method reads, so that no constructor, group or tensor data is part of its time. Rounds of all
contestants are interleaved and medians reported. The garbage collector is paused while a clock runs, as in ``timeit``.
Requests ask for one bucket per dtype: a partitioner that splits small buckets makes as many shards as there are ranks
for each of them, and would be timed for the size of its answer.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from shardrt.errors import ConfigError
from shardrt.plan import ParamSpec, Plan
from shardrt.protocols import Partitioner, PartitionRequest
from shardrt.registry import load_registry

_Key = TypeVar("_Key", bound=Hashable)

TORCH = "torch ZeroRedundancyOptimizer"
GROWTH = (10_000, 100_000)
_LAYER: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("norm_1.weight", (1024,)),
    ("attention.qkv.weight", (3072, 1024)),
    ("attention.qkv.bias", (3072,)),
    ("attention.out.weight", (1024, 1024)),
    ("attention.out.bias", (1024,)),
    ("norm_2.weight", (1024,)),
    ("mlp.up.weight", (4096, 1024)),
    ("mlp.up.bias", (4096,)),
    ("mlp.down.weight", (1024, 4096)),
    ("mlp.down.bias", (1024,)),
)


@attrs.frozen(kw_only=True)
class PlanningTime:
    """One contestant: median seconds at the size asked for and at the two sizes that growth is measured between."""

    name: str
    seconds: float
    growth_seconds: tuple[float, float] | None = None
    imbalance: float | None = None

    @property
    def growth(self) -> float | None:
        """How many times longer ten times as many parameters take."""
        return self.growth_seconds[1] / self.growth_seconds[0] if self.growth_seconds else None


@attrs.frozen(kw_only=True)
class PlanningReport:
    """The times of all contestants for one list of parameters."""

    params: int
    ranks: int
    rounds: int
    times: tuple[PlanningTime, ...]
    torch_seconds: float | None

    def speedup(self, row: PlanningTime) -> float | None:
        """How many times faster than torch's own partitioning; None where torch was left out."""
        return self.torch_seconds / row.seconds if self.torch_seconds is not None else None

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {
            "params": self.params,
            "ranks": self.ranks,
            "rounds": self.rounds,
            "torch_seconds": self.torch_seconds,
            "growth_params": list(GROWTH),
            "partitioners": [
                {
                    "name": row.name,
                    "seconds": row.seconds,
                    "times_faster_than_torch": self.speedup(row),
                    "imbalance": row.imbalance,
                    "growth": row.growth,
                }
                for row in self.times
            ],
        }


def transformer_params(count: int) -> tuple[ParamSpec, ...]:
    """The first ``count`` parameters of a transformer that is deep enough.

    Example:
        >>> from shardrt.bench.planning import transformer_params
        >>> [spec.name for spec in transformer_params(11)][-2:]
        ['layers.0.mlp.down.bias', 'layers.1.norm_1.weight']
    """
    return tuple(
        ParamSpec(name=f"layers.{layer}.{name}", shape=shape, dtype="float32")
        for layer, (name, shape) in ((index // len(_LAYER), _LAYER[index % len(_LAYER)]) for index in range(count))
    )


def measure_planning(
    *,
    params: int = 20_000,
    ranks: int = 1024,
    rounds: int = 5,
    growth: bool = True,
    beside_torch: bool = True,
    partitioners: Mapping[str, Partitioner] | None = None,
) -> PlanningReport:
    """Time every installed partitioner, and torch's, on one list of parameters.

    Example:
        >>> from shardrt.bench.planning import measure_planning
        >>> report = measure_planning(params=100, ranks=4, rounds=1, growth=False, beside_torch=False)
        >>> {"greedy", "flat", "bucket"} <= {row.name for row in report.times}
        True
    """
    for name, value in {"params": params, "ranks": ranks, "rounds": rounds}.items():
        if value < 1:
            raise ConfigError(f"{name} must be 1 or more, got {value}")
    chosen = dict(partitioners) if partitioners is not None else _installed()
    specs = transformer_params(params)
    request = PartitionRequest(params=specs, world_size=ranks)
    contestants = {name: _planner(partitioner, request) for name, partitioner in chosen.items()}
    if beside_torch:
        contestants[TORCH] = _torch_planner(specs, ranks)
    seconds = _medians(contestants, rounds)
    growths = _measure_growth(chosen, ranks, rounds) if growth else {}
    return PlanningReport(
        params=params,
        ranks=ranks,
        rounds=rounds,
        torch_seconds=seconds.pop(TORCH, None),
        times=tuple(
            PlanningTime(
                name=name,
                seconds=seconds[name],
                growth_seconds=growths.get(name),
                imbalance=Plan.build(specs, partitioner.partition(request), partitioner=name).imbalance,
            )
            for name, partitioner in chosen.items()
        ),
    )


def _installed() -> dict[str, Partitioner]:
    return {entry.record.name: entry.record.factory() for entry in load_registry().partitioners}


def _planner(partitioner: Partitioner, request: PartitionRequest) -> Callable[[], object]:
    return lambda: partitioner.partition(request)


def _measure_growth(partitioners: Mapping[str, Partitioner], ranks: int, rounds: int) -> dict[str, tuple[float, float]]:
    small, large = (PartitionRequest(params=transformer_params(count), world_size=ranks) for count in GROWTH)
    contestants: dict[tuple[str, int], Callable[[], object]] = {}
    for name, partitioner in partitioners.items():
        contestants[name, 0] = _planner(partitioner, small)
        contestants[name, 1] = _planner(partitioner, large)
    seconds = _medians(contestants, rounds)
    return {name: (seconds[name, 0], seconds[name, 1]) for name in partitioners}


def _torch_planner(specs: Sequence[ParamSpec], ranks: int) -> Callable[[], object]:
    import torch

    with warnings.catch_warnings():
        # Importing it defines functions with an interface that torch itself has deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    tensors = [torch.nn.Parameter(torch.empty(spec.shape, device="meta")) for spec in specs]
    optimizer: Any = object.__new__(ZeroRedundancyOptimizer)
    optimizer.world_size = ranks
    optimizer.param_groups = [{"params": tensors}]

    def plan() -> object:
        optimizer._partition_parameters_cache = []  # otherwise the second round would find the first one's answer
        return optimizer._partition_parameters()

    return plan


def _medians(contestants: Mapping[_Key, Callable[[], object]], rounds: int) -> dict[_Key, float]:
    times: dict[_Key, list[float]] = {name: [] for name in contestants}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in contestants.items():
                gc.collect()
                started = time.perf_counter()
                kept = run()
                times[name].append(time.perf_counter() - started)
                del kept  # freeing a result is no part of making the next one
    finally:
        if collecting:
            gc.enable()
    return {name: statistics.median(found) for name, found in times.items()}

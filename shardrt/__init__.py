"""shardrt: a plugin-based, backend-agnostic sharding runtime for PyTorch training.

Importing this package is cheap: torch is loaded when :class:`Runtime` is first asked for, so that plugins and tools
can look around without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardrt.errors import ShardrtError
from shardrt.plan import Bucket, ParamSpec, Partition, Plan, Shard
from shardrt.protocols import Availability, Group, PartitionRequest
from shardrt.registry import (
    HOOK_VERSION,
    BackendRecord,
    JoinPolicyRecord,
    PartitionerRecord,
    PlaceRecord,
    ScheduleRecord,
    StateFormatRecord,
    hookimpl,
    load_registry,
)

if TYPE_CHECKING:
    from shardrt.runtime import Runtime
    from shardrt.sharding.precision import MixedPrecision
    from shardrt.sharding.prefetching import Prefetch

__version__ = "0.1.0"

__all__ = [
    "HOOK_VERSION",
    "Availability",
    "BackendRecord",
    "Bucket",
    "Group",
    "JoinPolicyRecord",
    "MixedPrecision",
    "ParamSpec",
    "Partition",
    "PartitionRequest",
    "PartitionerRecord",
    "PlaceRecord",
    "Plan",
    "Prefetch",
    "Runtime",
    "ScheduleRecord",
    "Shard",
    "ShardrtError",
    "StateFormatRecord",
    "__version__",
    "hookimpl",
    "load_registry",
]


_LATE = {
    "Runtime": "shardrt.runtime",
    "MixedPrecision": "shardrt.sharding.precision",
    "Prefetch": "shardrt.sharding.prefetching",
}
"""Names whose modules import torch."""


def __getattr__(name: str) -> Any:
    if name in _LATE:
        import importlib

        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module 'shardrt' has no attribute {name!r}")

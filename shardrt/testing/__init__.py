"""What plugin authors test with: worker ranks that persist, and a conformance kit to subclass.

Example:
    >>> from shardrt.testing import RankPool
    >>> with RankPool(2) as pool:
    ...     pool.run("os:getenv", ranks=2, key="LOCAL_RANK")
    ['0', '1']
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardrt.testing.outcome import Outcome, RankFailure
from shardrt.testing.pool import RankPool

if TYPE_CHECKING:
    from shardrt.testing.conformance import (
        BackendConformance,
        JoinPolicyConformance,
        PartitionerConformance,
        PlaceConformance,
        ScheduleConformance,
        StateFormatConformance,
    )

__all__ = [
    "BackendConformance",
    "JoinPolicyConformance",
    "Outcome",
    "PartitionerConformance",
    "PlaceConformance",
    "RankFailure",
    "RankPool",
    "ScheduleConformance",
    "StateFormatConformance",
]


def __getattr__(name: str) -> Any:
    # The kit needs pytest, which workers and users of the pool alone do not have to have.
    if name in __all__ and name.endswith("Conformance"):
        from shardrt.testing import conformance

        return getattr(conformance, name)
    raise AttributeError(f"module 'shardrt.testing' has no attribute {name!r}")

"""ZeRO-1 through shardrt beside its peers, on the CPU over Gloo on loopback. How: see :mod:`shardrt.bench.contest`.

DeepSpeed and FSDP are not measured here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

from shardrt.bench.contest import DDP, PEERS, TORCH_ZERO, ContestReport, ContestSettings, combine, findings
from shardrt.launch import OnEvent, launch_ranks

CONTESTANTS: Mapping[str, str] = MappingProxyType(
    {
        **PEERS,
        "shardrt_flat": "shardrt, flat",
        "shardrt_greedy": "shardrt, greedy",
        "shardrt_under_ddp": "DDP + shardrt, greedy",
    }
)
"""Name to how tables call it, in the order of the first round."""
NOT_MEASURED = ("DeepSpeed", "FSDP")


@attrs.frozen(kw_only=True)
class PeersSettings(ContestSettings):
    """What to measure.

    Example:
        >>> from shardrt.bench.peers import PeersSettings
        >>> PeersSettings(ranks=1)
        Traceback (most recent call last):
        shardrt.errors.ConfigError: ranks must be a whole number from 2 up, got 1: alone there is nothing to shard
    """

    @property
    def contestants(self) -> Mapping[str, str]:
        """See :data:`CONTESTANTS`."""
        return CONTESTANTS


@attrs.frozen(kw_only=True)
class PeersReport(ContestReport):
    """All contestants, in the order of :data:`CONTESTANTS`."""

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {**super().to_json(), "not_measured_here": list(NOT_MEASURED)}


def measure_peers(settings: PeersSettings, *, on_event: OnEvent | None = None, patience: float = 120.0) -> PeersReport:
    """Start the ranks, let them measure, and put together what they bring home.

    ``on_event`` and ``patience`` are those of :func:`shardrt.launch.launch_ranks`; an event names the ``contestant``
    and counts the steps ``done`` out of ``settings.all_steps``.
    """
    started = time.monotonic()
    answers = launch_ranks(
        "shardrt.bench.peers_rank", settings.to_json(), ranks=settings.ranks, on_event=on_event, patience=patience
    )
    return PeersReport(**findings(settings, answers, time.monotonic() - started))


__all__ = [
    "CONTESTANTS",
    "DDP",
    "NOT_MEASURED",
    "TORCH_ZERO",
    "PeersReport",
    "PeersSettings",
    "combine",
    "measure_peers",
]

"""The conformance kit: subclass with a factory, and pytest runs everything a plugin of that kind must get right."""

from __future__ import annotations

from shardrt.testing.conformance.backend import BackendConformance
from shardrt.testing.conformance.join_policy import JoinPolicyConformance
from shardrt.testing.conformance.partitioner import PartitionerConformance
from shardrt.testing.conformance.place import PlaceConformance
from shardrt.testing.conformance.schedule import ScheduleConformance
from shardrt.testing.conformance.state_format import StateFormatConformance

__all__ = [
    "BackendConformance",
    "JoinPolicyConformance",
    "PartitionerConformance",
    "PlaceConformance",
    "ScheduleConformance",
    "StateFormatConformance",
]

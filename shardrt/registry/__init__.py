"""Plugins: the hooks they implement, the records they yield, and the registry that finds and checks them."""

from shardrt.registry.hookspecs import HOOK_VERSION, hookimpl
from shardrt.registry.loading import load_registry
from shardrt.registry.records import (
    BackendRecord,
    JoinPolicyRecord,
    PartitionerRecord,
    PlaceRecord,
    ScheduleRecord,
    StateFormatRecord,
)
from shardrt.registry.registry import Registry

__all__ = [
    "HOOK_VERSION",
    "BackendRecord",
    "JoinPolicyRecord",
    "PartitionerRecord",
    "PlaceRecord",
    "Registry",
    "ScheduleRecord",
    "StateFormatRecord",
    "hookimpl",
    "load_registry",
]

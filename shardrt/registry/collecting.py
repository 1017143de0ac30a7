"""Asking one plugin for its records."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import pluggy

from shardrt.errors import PluginConflictError, PluginLoadError, RecordTypeError
from shardrt.registry.discovery import Origin
from shardrt.registry.records import (
    BackendRecord,
    JoinPolicyRecord,
    PartitionerRecord,
    PlaceRecord,
    Record,
    ScheduleRecord,
    StateFormatRecord,
)

RECORD_TYPES = MappingProxyType(
    {
        "shardrt_partitioners": PartitionerRecord,
        "shardrt_backends": BackendRecord,
        "shardrt_schedules": ScheduleRecord,
        "shardrt_state_formats": StateFormatRecord,
        "shardrt_places": PlaceRecord,
        "shardrt_join_policies": JoinPolicyRecord,
    }
)
"""The registration hooks, in the order in which they are called, and what each must yield."""

KINDS = MappingProxyType(
    {
        PartitionerRecord: "partitioner",
        BackendRecord: "backend",
        ScheduleRecord: "schedule",
        StateFormatRecord: "state format",
        PlaceRecord: "place",
        JoinPolicyRecord: "join policy",
    }
)


def collect_records(manager: pluggy.PluginManager, origin: Origin, implemented: tuple[str, ...]) -> tuple[Record, ...]:
    """The records of the only plugin of a manager, checked.

    Example:
        >>> import pluggy, shardrt
        >>> from shardrt.registry import hookspecs
        >>> from shardrt.registry.collecting import collect_records
        >>> from shardrt.registry.discovery import Origin
        >>> class Plugin:
        ...     @shardrt.hookimpl
        ...     def shardrt_schedules(self):
        ...         yield shardrt.ScheduleRecord(name="mine", summary="my order", factory=object)
        >>> manager = pluggy.PluginManager("shardrt")
        >>> manager.add_hookspecs(hookspecs)
        >>> _ = manager.register(Plugin())
        >>> [record.name for record in collect_records(manager, Origin(name="mine"), ("shardrt_schedules",))]
        ['mine']
    """
    records: list[Record] = []
    for hook, expected in RECORD_TYPES.items():
        if hook in implemented:
            records.extend(_records_of_hook(manager, origin, hook, expected))
    seen: set[tuple[str, ...]] = set()
    for record in records:
        if identity(record) in seen:
            raise PluginConflictError(
                f"{origin} registers the {describe(record)} twice; yield it once, or {origin.remedy}"
            )
        seen.add(identity(record))
    return tuple(records)


def identity(record: Record) -> tuple[str, ...]:
    """What no two plugins may register: the kind and the key.

    Example:
        >>> import shardrt
        >>> from shardrt.registry.collecting import identity
        >>> identity(shardrt.BackendRecord(name="mine", device_type="cpu", summary="my wires", factory=object))
        ('backend', 'cpu', 'mine')
    """
    return (next(kind for record_type, kind in KINDS.items() if isinstance(record, record_type)), *record.key)


def describe(record: Record) -> str:
    """Kind and name, for a sentence.

    Example:
        >>> import shardrt
        >>> from shardrt.registry.collecting import describe
        >>> describe(shardrt.BackendRecord(name="mine", device_type="cpu", summary="my wires", factory=object))
        "backend 'mine' for device type 'cpu'"
    """
    where = f" for device type {record.device_type!r}" if isinstance(record, BackendRecord) else ""
    return f"{identity(record)[0]} {record.name!r}{where}"


def _records_of_hook(manager: pluggy.PluginManager, origin: Origin, hook: str, expected: type[Record]) -> list[Record]:
    caller: pluggy.HookCaller = getattr(manager.hook, hook)
    wanted = f"yield {expected.__name__} objects, or {origin.remedy}"
    try:
        results: list[Any] = caller()
        # pluggy drops a result of None, so that only the count tells.
        if len(results) < len(caller.get_hookimpls()):
            raise RecordTypeError(f"{origin}: hook {hook} returned None; {wanted}")
        yielded: list[Any] = []
        for result in results:
            if not isinstance(result, Iterable):
                raise RecordTypeError(f"{origin}: hook {hook} returned {result!r}, which is not iterable; {wanted}")
            yielded.extend(result)
    except RecordTypeError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginLoadError(
            f"{origin}: hook {hook} raised {type(error).__name__}: {error}; {origin.remedy}"
        ) from error
    for record in yielded:
        if not isinstance(record, expected):
            raise RecordTypeError(f"{origin}: hook {hook} yielded {record!r} of type {type(record).__name__}; {wanted}")
    return yielded

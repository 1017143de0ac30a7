"""What registration hooks yield: frozen descriptions, cheap to make, so that listing plugins imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs

from shardrt.protocols import Availability, Communicator, JoinPolicy, Partitioner, Place, Schedule, StateFormat

_NAME = re.compile(r"[a-z][a-z0-9_-]*\Z")


def _is_plugin_name(_: Any, attribute: attrs.Attribute[str], value: object) -> None:
    if not isinstance(value, str) or not _NAME.match(value):
        raise ValueError(
            f"{attribute.name} must be a word of lower-case letters, digits, '-' and '_' that starts with a letter, "
            f"got {value!r}"
        )


def _is_one_line(_: Any, attribute: attrs.Attribute[str], value: object) -> None:
    if not isinstance(value, str) or not value.strip() or "\n" in value:
        raise ValueError(f"{attribute.name} must be one non-empty line, got {value!r}")


@attrs.frozen(kw_only=True)
class Record:
    """The fields every record has."""

    name: str = attrs.field(validator=_is_plugin_name)
    summary: str = attrs.field(validator=_is_one_line)
    needs: tuple[str, ...] = attrs.field(
        default=(), validator=attrs.validators.deep_iterable(attrs.validators.instance_of(str))
    )
    """Distributions beyond shardrt's own dependencies, by the names pip knows."""

    @property
    def key(self) -> tuple[str, ...]:
        """What must be unique among records of one kind."""
        return (self.name,)


@attrs.frozen(kw_only=True)
class PartitionerRecord(Record):
    """A partitioning policy. ``factory(**options)`` makes it; options come from the user's configuration.

    Example:
        >>> from shardrt import PartitionerRecord
        >>> PartitionerRecord(name="mine", summary="everything to rank 0", factory=object).key
        ('mine',)
    """

    factory: Callable[..., Partitioner] = attrs.field(validator=attrs.validators.is_callable())


def _available() -> Availability:
    return Availability.yes()


@attrs.frozen(kw_only=True)
class BackendRecord(Record):
    """A way to move bytes for one device type. Two vendors ship an "hccl": the key is (device type, name).

    Example:
        >>> from shardrt import BackendRecord
        >>> BackendRecord(name="hccl", device_type="npu", summary="Ascend", factory=object).key
        ('npu', 'hccl')
    """

    factory: Callable[..., Communicator] = attrs.field(validator=attrs.validators.is_callable())
    """``factory(group, **options)`` with a :class:`~shardrt.protocols.Group` makes the communicator."""
    device_type: str = attrs.field(default="cpu", validator=attrs.validators.instance_of(str))
    """A torch device type, or ``"*"`` for any."""
    probe: Callable[[], Availability] = attrs.field(default=_available, validator=attrs.validators.is_callable())
    """Says whether it can run here. Must not import vendor packages that have side effects: look for the spec."""
    process_group: str | None = None
    """What ``torch.distributed.init_process_group`` is to be given when the runtime starts a group itself."""
    prepare: Callable[[], None] | None = None
    """Called once before the runtime starts a process group: the place to import a vendor package."""
    priority: int = 0
    """``auto`` takes the available backend with the highest priority for the device; 0 and below is never taken."""
    world_sizes: tuple[int, int | None] = (1, None)
    """Smallest and largest world size, None for no limit."""
    introduce: Callable[..., Any] | None = None
    """What this process tells the others of itself before the backend is taken: a small JSON-able value. This and
    ``suits`` get those of the user's options that they have parameters for."""
    suits: Callable[..., Availability] | None = None
    """Asked on every rank with what all ranks told, in rank order: whether it can run among them. The backend is taken
    only if all say yes. For backends of which no process alone can tell, such as those of one host."""

    @property
    def key(self) -> tuple[str, ...]:
        """Device type and name."""
        return (self.device_type, self.name)

    def __attrs_post_init__(self) -> None:
        if (self.introduce is None) != (self.suits is None):
            raise ValueError(f"backend {self.name!r} has introduce without suits or the other way: give both or none")


@attrs.frozen(kw_only=True)
class ScheduleRecord(Record):
    """A way to order reductions, steps and gathers. ``factory(**options)`` makes it.

    Example:
        >>> from shardrt import ScheduleRecord
        >>> ScheduleRecord(name="sync", summary="one thing after the other", factory=object).name
        'sync'
    """

    factory: Callable[..., Schedule] = attrs.field(validator=attrs.validators.is_callable())


@attrs.frozen(kw_only=True)
class StateFormatRecord(Record):
    """A file format for sharded state. ``factory(**options)`` makes it.

    Example:
        >>> from shardrt import StateFormatRecord
        >>> StateFormatRecord(name="safetensors", summary="no pickle", factory=object).name
        'safetensors'
    """

    factory: Callable[..., StateFormat] = attrs.field(validator=attrs.validators.is_callable())


@attrs.frozen(kw_only=True)
class PlaceRecord(Record):
    """A kind of place for checkpoints. ``factory(root, **options)`` makes one for a directory or an address.

    Example:
        >>> from shardrt import PlaceRecord
        >>> PlaceRecord(name="files", summary="file systems", factory=object).name
        'files'
    """

    factory: Callable[..., Place] = attrs.field(validator=attrs.validators.is_callable())


@attrs.frozen(kw_only=True)
class JoinPolicyRecord(Record):
    """A way to go on when ranks run out of inputs one after the other. ``factory(**options)`` makes it.

    Example:
        >>> from shardrt import JoinPolicyRecord
        >>> JoinPolicyRecord(name="active", summary="average over those with inputs", factory=object).name
        'active'
    """

    factory: Callable[..., JoinPolicy] = attrs.field(validator=attrs.validators.is_callable())

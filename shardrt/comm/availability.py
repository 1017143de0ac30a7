"""Whether a backend can run here, and which one ``auto`` takes: answered while the runtime is built, with reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from shardrt.errors import BackendUnavailableError
from shardrt.registry.probing import probe

if TYPE_CHECKING:
    from shardrt.protocols import Availability
    from shardrt.registry.records import BackendRecord


def require_available(record: BackendRecord, answer: Availability | None = None) -> None:
    """Raise :class:`~shardrt.errors.BackendUnavailableError` with reason and fix unless the backend can run here.

    An ``answer`` that is known already is taken instead of the backend's probe.

    Example:
        >>> from shardrt import Availability, BackendRecord
        >>> from shardrt.comm import require_available
        >>> record = BackendRecord(name="foo", device_type="bar", summary="foo over bar", factory=object,
        ...                        probe=lambda: Availability.no("there is no bar", fix="plug one in"))
        >>> require_available(record)
        Traceback (most recent call last):
        shardrt.errors.BackendUnavailableError: backend 'foo' (device bar) is unavailable: there is no bar; fix: plug one in
    """  # noqa: E501
    answer = probe(record) if answer is None else answer
    if not answer.ok:
        raise BackendUnavailableError(
            f"backend {record.name!r} (device {record.device_type}) is unavailable: {answer.reason}"
            + (f"; fix: {answer.fix}" if answer.fix else "")
        )


def backends_to_ask(records: Iterable[BackendRecord], device_type: str, world_size: int) -> list[BackendRecord]:
    """The backends that ``auto`` might take, but of which all ranks must tell whether they suit them.

    Example:
        >>> from shardrt import load_registry
        >>> from shardrt.comm.availability import backends_to_ask
        >>> [record.name for record in backends_to_ask([one.record for one in load_registry().backends], "cpu", 1)]
        []
    """
    if world_size == 1:
        return []
    fitting = [record for record in records if record.suits and _fits(record, device_type, world_size) is None]
    return sorted(fitting, key=lambda record: (-record.priority, record.key))


def choose_backend(
    records: Iterable[BackendRecord],
    device_type: str,
    world_size: int,
    answers: Mapping[tuple[str, ...], Availability] | None = None,
) -> tuple[BackendRecord, str]:
    """What ``auto`` means: the available backend of the highest priority for the device, and why in one line.

    Priority 0 and below is never taken. Records are asked from the highest priority down and no further than needed.
    ``answers`` are those of all ranks, by key; without them the reason says where it depends on such.

    Example:
        >>> from shardrt import BackendRecord
        >>> from shardrt.comm import choose_backend
        >>> records = [
        ...     BackendRecord(name="gloo", summary="sockets", factory=object, priority=10),
        ...     BackendRecord(name="nccl", device_type="cuda", summary="NVIDIA", factory=object, priority=100),
        ... ]
        >>> choose_backend(records, "cpu", 2)[1]
        'auto chose gloo for cpu with 2 ranks: the only one that fits; nccl not considered: for cuda'
    """
    ranks = f"{world_size} rank{'s' if world_size != 1 else ''}"
    passed_over: list[str] = []
    chosen: BackendRecord | None = None
    lower: list[str] = []
    for record in sorted(records, key=lambda record: (-record.priority, record.key)):
        if chosen is not None and _fits(record, device_type, world_size) is None:
            lower.append(f"{record.name} ({record.priority})")
            continue
        why_not = _fits(record, device_type, world_size)
        if why_not is None:
            answer = (answers or {}).get(record.key) or probe(record)
            if answer.ok:
                chosen = record
                continue
            why_not = f"unavailable: {answer.reason}" + (f"; fix: {answer.fix}" if answer.fix else "")
        passed_over.append(f"{record.name} {why_not}")
    if chosen is None:
        listed = (
            "".join(f"\n  {line}" for line in passed_over)
            or "\n  (no backend is installed, or SHARDRT_PLUGINS leaves them out)"
        )
        raise BackendUnavailableError(
            f"auto found no backend for {device_type} with {ranks}; of those installed:{listed}\n"
            "fix: follow one of these, or name a backend with backend=..."
        )
    reason = f"priority {chosen.priority}, before {', '.join(lower)}" if lower else "the only one that fits"
    if chosen.suits is not None and answers is None and world_size > 1:
        reason += ", if all ranks find that it suits them"
    tail = "".join(f"; {line}" for line in passed_over)
    return chosen, f"auto chose {chosen.name} for {device_type} with {ranks}: {reason}{tail}"


def _fits(record: BackendRecord, device_type: str, world_size: int) -> str | None:
    """Why not, or None if nothing but its availability is in question."""
    if record.device_type not in ("*", device_type):
        return f"not considered: for {record.device_type}"
    if record.priority <= 0:
        return "not considered: only taken by name"
    smallest, largest = record.world_sizes
    if world_size < smallest or (largest is not None and world_size > largest):
        limits = f"at least {smallest}" if largest is None else f"{smallest} to {largest}"
        return f"not considered: takes {limits} ranks"
    return None

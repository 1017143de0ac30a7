"""Whether what a record describes can run here, without importing what it needs."""

from __future__ import annotations

from importlib import metadata

from shardrt.protocols import Availability
from shardrt.registry.records import BackendRecord, Record


def probe(record: Record) -> Availability:
    """Look for the distributions it needs, then ask a backend's own probe. Never raises.

    Example:
        >>> import shardrt
        >>> from shardrt.registry.probing import probe
        >>> record = shardrt.ScheduleRecord(name="mine", summary="my order", factory=object, needs=("no-such-thing",))
        >>> probe(record).reason, probe(record).fix
        ('no-such-thing is not installed', 'pip install no-such-thing')
    """
    missing = [name for name in record.needs if not _is_installed(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return Availability.no(f"{', '.join(missing)} {verb} not installed", fix=f"pip install {' '.join(missing)}")
    return _ask(record) if isinstance(record, BackendRecord) else Availability.yes()


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _ask(record: BackendRecord) -> Availability:
    try:
        answer: object = record.probe()
    # A probe looks at foreign software: whatever that does, the answer is "not here".
    except (Exception, SystemExit) as error:
        return Availability.no(f"its probe raised {type(error).__name__}: {error}", fix="upgrade or report the plugin")
    if not isinstance(answer, Availability):
        return Availability.no(
            f"its probe returned {answer!r} instead of an Availability", fix="upgrade or report the plugin"
        )
    return answer

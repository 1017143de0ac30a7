"""Whether what a record describes can run here, without importing what it needs."""

from __future__ import annotations

from importlib import metadata

from shardrt.protocols import Availability
from shardrt.registry.records import BackendRecord, Record

_FAULTY = "upgrade or report the plugin"


def probe(record: Record) -> Availability:
    """Ask a backend's own probe, then look for the distributions it needs. Never raises.

    Example:
        >>> import shardrt
        >>> from shardrt.registry.probing import probe
        >>> record = shardrt.ScheduleRecord(name="mine", summary="my order", factory=object, needs=("no-such-thing",))
        >>> probe(record).reason, probe(record).fix
        ('no-such-thing is not installed', 'pip install no-such-thing')
    """
    missing = [name for name in record.needs if not _is_installed(name)]
    verb = "is" if len(missing) == 1 else "are"
    lacking = Availability.no(f"{', '.join(missing)} {verb} not installed", fix=f"pip install {' '.join(missing)}")
    if not isinstance(record, BackendRecord):
        return lacking if missing else Availability.yes()
    try:
        answer: object = record.probe()
    # A probe looks at foreign software: whatever that does, the answer is "not here".
    except (Exception, SystemExit) as error:
        said = f"its probe raised {type(error).__name__}: {error}"
        return lacking if missing else Availability.no(said, fix=_FAULTY)
    if not isinstance(answer, Availability):
        return Availability.no(f"its probe returned {answer!r} instead of an Availability", fix=_FAULTY)
    # A plugin's own reason and fix say more than the names of distributions.
    return lacking if missing and answer.ok else answer


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True

"""The reports of one failure, from a directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardrt.errors import ConfigError
from shardrt.flight.report import NAME, HangReport, read_report, report_name


def read_reports(directory: str | Path) -> tuple[list[HangReport], list[str]]:
    """The reports in a directory, in rank order, and a note for each file that is none.

    Example:
        >>> import pathlib, tempfile
        >>> from shardrt.flight import FlightRecorder
        >>> from shardrt.flight.reading import read_reports
        >>> from shardrt.flight.report import make_report, write_report
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for rank in (1, 0):
        ...         report = make_report(FlightRecorder(rank, 2), TimeoutError("long"), peers={}, about={})
        ...         _ = write_report(pathlib.Path(folder), report)
        ...     _ = pathlib.Path(folder, "rank-00007-of-00008.json").write_text("{")
        ...     reports, notes = read_reports(folder)
        >>> [report.rank for report in reports], len(notes)
        ([0, 1], 1)
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise ConfigError(
            f"{str(folder)!r} is not a directory; give the one that hang_reports or SHARDRT_HANG_DIR named"
        )
    reports, notes = [], []
    for path in sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name)):
        try:
            reports.append(read_report(path))
        except ConfigError as error:
            notes.append(str(error))
    if not reports:
        damaged = "".join(f"; {note}" for note in notes)
        raise ConfigError(
            f"no hang report in {str(folder)!r}: there is no readable file like {report_name(0, 2)}{damaged}; ranks "
            "write them when a wait fails, with Runtime(hang_reports=DIR) or SHARDRT_HANG_DIR=DIR"
        )
    return _of_one_world(reports, notes), notes


def _of_one_world(reports: Sequence[HangReport], notes: list[str]) -> list[HangReport]:
    """A directory may hold reports of an earlier run with another number of ranks: the latest world is looked at."""
    latest = max(reports, key=lambda report: report.time)
    kept = [report for report in reports if report.world_size == latest.world_size]
    if len(kept) < len(reports):
        notes.append(
            f"{len(reports) - len(kept)} reports are of worlds of other sizes than {latest.world_size} and left out"
        )
    return sorted(kept, key=lambda report: report.rank)

"""Where the ways of ranks part: the first operation that not all of them issued alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from shardrt.flight.recorder import described
from shardrt.flight.report import HangReport

_SIZES_MAY_DIFFER = ("all_to_all", "exchange")
"""Operations in which each rank may bring another number of bytes."""


@attrs.frozen(kw_only=True)
class Parting:
    """An operation of which ranks differ."""

    communicator: int
    number: int
    by_rank: Mapping[int, str]
    """What each rank issued under this number, or that it issued nothing."""
    missing: tuple[int, ...]
    """Ranks that issued nothing under this number."""
    differs: bool
    """Whether ranks issued different operations, rather than some of them none."""

    def describe(self) -> str:
        """In a sentence."""
        told = "; ".join(f"rank {rank}: {what}" for rank, what in self.by_rank.items())
        return f"ranks part at number {self.number} of communicator {self.communicator}: {told}"


def find_parting(reports: Sequence[HangReport]) -> Parting | None:
    """The earliest operation that ranks issued differently, or that some issued and others did not; None if there is
    none among those that are still known.

    Example:
        >>> from shardrt.flight.parting import find_parting
        >>> find_parting([]) is None
        True
    """
    found: list[tuple[float, Parting]] = []
    communicators = {operation["communicator"] for report in reports for operation in report.operations}
    for communicator in communicators:
        ways = {
            report.rank: {one["number"]: one for one in report.operations if one["communicator"] == communicator}
            for report in reports
        }
        parting = _first(communicator, ways)
        if parting is not None:
            issued = [way[parting.number].get("issued") or 0.0 for way in ways.values() if parting.number in way]
            found.append((min(issued, default=0.0), parting))
    partings = [parting for _, parting in sorted(found, key=lambda one: one[0])]
    # Ranks that issued different operations cannot go on. One that issued none may only be late, or be told so.
    return next((one for one in partings if one.differs), None) or _crossed(partings) or next(iter(partings), None)


def _crossed(partings: Sequence[Parting]) -> Parting | None:
    """Two operations on different communicators, each issued by a rank that did not issue the other."""
    for one in partings:
        for other in partings:
            instead = {rank: what for rank, what in other.by_rank.items() if rank in one.missing}
            instead = {rank: what for rank, what in instead.items() if rank not in other.missing}
            if instead and set(other.missing) - set(one.missing):
                told = {
                    rank: f"{what}, number {other.number} of communicator {other.communicator}, instead"
                    for rank, what in instead.items()
                }
                return attrs.evolve(
                    one,
                    by_rank={rank: told.get(rank, what) for rank, what in one.by_rank.items()},
                    missing=tuple(rank for rank in one.missing if rank not in instead),
                    differs=True,
                )
    return None


def _first(communicator: int, ways: Mapping[int, Mapping[int, Mapping[str, Any]]]) -> Parting | None:
    # A ring forgets: before the latest of the ranks' first entries nothing can be compared.
    known = max((min(way) for way in ways.values() if way), default=0)
    for number in sorted({number for way in ways.values() for number in way}):
        if number < known:
            continue
        at = {rank: way.get(number) for rank, way in ways.items()}
        missing = tuple(rank for rank, operation in at.items() if operation is None)
        differs = len({_alike(operation) for operation in at.values() if operation is not None}) > 1
        if missing or differs:
            by_rank = {rank: "nothing" if operation is None else _told(operation) for rank, operation in at.items()}
            return Parting(communicator=communicator, number=number, by_rank=by_rank, missing=missing, differs=differs)
    return None


def _alike(operation: Mapping[str, Any]) -> tuple[Any, ...]:
    size = None if operation["kind"] in _SIZES_MAY_DIFFER else operation.get("bytes")
    return operation["kind"], str(operation.get("topic") or ""), size


def _told(operation: Mapping[str, Any]) -> str:
    if operation["kind"] == "exchange":
        return described("exchange", operation["communicator"], operation["number"], str(operation.get("topic") or ""))
    return f"{operation['kind']} of {operation.get('bytes')} bytes"

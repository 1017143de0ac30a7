"""From the ranks' reports to what probably happened, for people.

Note [Likely causes]: reports are looked at in the order in which evidence is strong. A rank that raised an error of its
own said so. A rank that has fallen silent is stopped or gone, and the system may even have said which. A rank that has
closed its runtime is not coming back. Ranks that issued different operations make different calls. A rank that is
alive, has nothing under way and did not issue what the others wait for is busy or stuck in its own code; its stacks
tell where.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from shardrt.flight.parting import Parting, find_parting
from shardrt.flight.report import HangReport
from shardrt.flight.telling import describe_beat, is_silent, name_of

_PASSING_ON = ("CommunicationError", "PeerError")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_NOT_THE_USERS = re.compile(r"/(shardrt|shardrt_\w+|torch)/|/threading\.py$")


@attrs.frozen(kw_only=True)
class RankView:
    """What is known of one rank, by itself or by the others."""

    rank: int
    reported: bool
    silent: bool
    heard: float | None
    """Seconds between its last words and the failure; None if it was never heard."""
    last: str
    """What it did last."""
    waited: str
    """What it waited for, and for whom."""
    error: str
    where: str
    """Where its main thread was, outside of shardrt and torch."""
    pid: int | None
    host: str
    process: str | None
    """What the system said of its process: ``stopped``, ``gone``; None where nobody asked."""


@attrs.frozen(kw_only=True)
class Explanation:
    """What probably happened, and what to do."""

    world_size: int
    ranks: tuple[RankView, ...]
    cause: str
    """One of ``raised``, ``disagreed``, ``stopped``, ``lost``, ``silent``, ``left``, ``other calls``, ``busy``,
    ``slow``, ``unknown``."""
    guilty: tuple[int, ...]
    """The ranks it seems to have begun with."""
    text: str
    advice: str
    parting: Parting | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return attrs.asdict(self) | {"parting": None if self.parting is None else self._parting()}

    def _parting(self) -> dict[str, Any]:
        assert self.parting is not None
        told = {str(rank): what for rank, what in self.parting.by_rank.items()}
        return attrs.asdict(self.parting) | {"by_rank": told}


def explain_reports(reports: Sequence[HangReport]) -> Explanation:
    """What the reports of one failure tell together. See Note [Likely causes].

    Example:
        >>> import pathlib, tempfile
        >>> from shardrt.flight import FlightRecorder
        >>> from shardrt.flight.explaining import explain_reports
        >>> from shardrt.flight.report import make_report, read_report, write_report
        >>> report = make_report(FlightRecorder(1, 2), ValueError("bad batch"), peers={}, about={})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     explain_reports([read_report(write_report(pathlib.Path(folder), report))]).text
        'rank 1 failed by itself: ValueError: bad batch'
    """
    assert reports
    world_size = reports[0].world_size
    by_rank = {report.rank: report for report in reports}
    views = tuple(_view(rank, by_rank.get(rank), reports) for rank in range(world_size))
    parting = find_parting(reports)
    cause, guilty, text, advice = _cause(views, by_rank, parting)
    return Explanation(
        world_size=world_size,
        ranks=views,
        cause=cause,
        guilty=guilty,
        text=text,
        advice=advice,
        parting=parting,
        notes=tuple(_notes(reports)),
    )


def _view(rank: int, report: HangReport | None, reports: Sequence[HangReport]) -> RankView:
    if report is not None:
        beat, now, elsewhere = report.own, report.time, report.elsewhere
        waited = _waited(report)
    else:
        seen = [(one.peers[rank], one.time) for one in reports if rank in one.peers]
        beat, _ = max(seen, key=lambda pair: pair[0]["time"], default=({}, 0.0))
        # Silent for whoever asked last: the others may have asked while it still spoke.
        now, elsewhere, waited = max(one.time for one in reports), False, ""
        if not beat:
            return RankView(
                rank=rank,
                reported=False,
                silent=True,
                heard=None,
                last="never heard",
                waited="",
                error="",
                where="",
                pid=None,
                host="",
                process=None,
            )
        words = [one.get("process") for one, _ in seen]
        beat = {**beat, "process": next((word for word in words if word), None)}
        waited = _under_way(beat)
    pid, process = beat.get("pid"), beat.get("process")
    return RankView(
        rank=rank,
        reported=report is not None,
        silent=report is None and is_silent(beat, now=now),
        heard=max(0.0, now - beat["time"]),
        last=describe_beat({**beat, "failure": None}, now=beat["time"]),
        waited="elsewhere" if elsewhere else waited,
        error="" if report is None else f"{report.error_type}: {report.error}",
        where="" if report is None else where_it_was(report.stacks),
        pid=pid if isinstance(pid, int) else None,
        host=str(beat.get("host") or ""),
        process=str(process) if process else None,
    )


def _waited(report: HangReport) -> str:
    for state in ("failed", "under way"):
        for operation in report.operations:
            if operation.get("state") == state:
                whom = ", ".join(str(rank) for rank in operation.get("waits_for") or ())
                return f"{name_of(operation)}" + (f" for rank {whom}" if whom else "")
    return ""


def _under_way(beat: Mapping[str, Any]) -> str:
    return ", ".join(name_of(one) for one in beat.get("under_way") or ())


Cause = tuple[str, tuple[int, ...], str, str]


def _cause(views: Sequence[RankView], reports: Mapping[int, HangReport], parting: Parting | None) -> Cause:
    return (
        _raised(views, reports)
        or _silent(views)
        or _left(views, reports)
        or _other_calls(parting)
        or _busy(views, reports)
        or _unknown(views)
    )


def _raised(views: Sequence[RankView], reports: Mapping[int, HangReport]) -> Cause | None:
    own = [report for report in reports.values() if report.error_type not in _PASSING_ON]
    if not own:
        return None
    if all(report.error_type == "HandshakeError" for report in own):
        told = sorted(own, key=lambda report: report.time)[0]
        return "disagreed", (), f"ranks disagree: {told.error}", "follow the fix that the message names"
    first = min((report for report in own if report.error_type != "HandshakeError"), key=lambda report: report.time)
    rank = views[first.rank]
    return (
        "raised",
        (first.rank,),
        f"rank {first.rank} failed by itself: {rank.error}",
        f"look at the traceback in the output of rank {first.rank}; the other ranks only stopped because of it",
    )


def _silent(views: Sequence[RankView]) -> Cause | None:
    silent = [view for view in views if view.silent]
    if not silent:
        return None
    guilty = tuple(view.rank for view in silent)
    told = "; ".join(_told_silent(view) for view in silent)
    stopped = [view for view in silent if (view.process or "").startswith("stopped")]
    if stopped:
        pids = " ".join(str(view.pid) for view in stopped)
        advice = (
            f"find out who stopped it (a debugger, Ctrl-Z, a batch system that suspends jobs); `kill -CONT {pids}` "
            "lets it go on, but its peers have given up: start anew"
        )
        return "stopped", guilty, told, advice
    if all(view.process == "gone" for view in silent):
        return (
            "lost",
            guilty,
            told,
            "look at the end of its output and at the system's log: SIGKILL by the kernel for want of memory leaves no "
            "traceback (dmesg has it); then start anew",
        )
    advice = (
        "look on its host whether the process is there (gone: its output and dmesg; stopped: who stopped it; there: "
        "`py-spy dump --pid PID`, since something holds its interpreter), and whether the host can be reached"
    )
    return "silent", guilty, told, advice


def _told_silent(view: RankView) -> str:
    if view.heard is None:
        return f"rank {view.rank} was never heard"
    where = f" on {view.host}" if view.host else ""
    known = {None: "is silent", "gone": "is gone"}.get(view.process, f"is {view.process}")
    return (
        f"rank {view.rank} {known} (process {view.pid}{where}): it was last heard {view.heard:.1f} s before the others "
        f"gave up; it {view.last}".replace("it last finished", "it had last finished")
    )


def _left(views: Sequence[RankView], reports: Mapping[int, HangReport]) -> Cause | None:
    left = [view for view in views if not view.reported and "has closed its runtime" in view.last]
    if not left:
        return None
    who = _ranks(left)
    return (
        "left",
        tuple(view.rank for view in left),
        f"{who} closed the runtime while others went on: {left[0].last}",
        "give every rank the same number of steps; see whether one of them has less data or breaks out of its loop",
    )


def _other_calls(parting: Parting | None) -> Cause | None:
    if parting is None or not parting.differs:
        return None
    by_call: dict[str, list[int]] = {}
    for rank, what in parting.by_rank.items():
        if rank not in parting.missing:
            by_call.setdefault(what, []).append(rank)
    fewest = min(len(ranks) for ranks in by_call.values())
    odd = [rank for ranks in by_call.values() if len(ranks) == fewest for rank in ranks]
    return (
        "other calls",
        tuple(odd) if len(by_call) > 1 and fewest * 2 < len(parting.by_rank) else (),
        f"ranks make different calls: {parting.describe()}",
        "look for a condition that is not the same on all ranks around step, clip_grad_norm_, evaluation or saving; "
        "every rank must make the same calls in the same order",
    )


def _busy(views: Sequence[RankView], reports: Mapping[int, HangReport]) -> Cause | None:
    elsewhere = [view for view in views if view.waited == "elsewhere"]
    quiet = [view for view in views if not view.reported and "none under way" in view.last]
    busy = elsewhere or quiet
    if not busy:
        return None
    at = "; ".join(f"rank {view.rank} was at {view.where}" for view in busy if view.where)
    pids = ", ".join(f"rank {view.rank}: process {view.pid} on {view.host}" for view in busy)
    return (
        "busy",
        tuple(view.rank for view in busy),
        f"{_ranks(busy)} alive, but outside of the runtime while the others waited"
        + (f": {at}" if at else f"; it {busy[0].last}"),
        "if it was only slow there (an evaluation, a download, writing a file), raise Runtime(timeout=...); if it is "
        f"stuck there (a lock, a data loader), the place is where to look ({pids}; `py-spy dump --pid PID` shows more)",
    )


def _unknown(views: Sequence[RankView]) -> Cause:
    waiting = [view for view in views if view.waited]
    if waiting and all(view.reported for view in views):
        return (
            "slow",
            (),
            "every rank was in the same call and reported: the network or a rank was slower than the timeout",
            "raise Runtime(timeout=...), or look for what slowed the network down; `shardrt bench link` measures it",
        )
    return (
        "unknown",
        (),
        "the reports do not tell: no rank is silent, none failed by itself, and no operation differs",
        "collect the reports of all ranks in one directory; set SHARDRT_HANG_DIR to one that all of them can write to",
    )


def _ranks(views: Sequence[RankView]) -> str:
    names = ", ".join(str(view.rank) for view in views)
    return f"ranks {names} were" if len(views) > 1 else f"rank {names} was"


def _notes(reports: Sequence[HangReport]) -> list[str]:
    notes = []
    if len({report.attempt for report in reports}) > 1:
        notes.append("reports are of different attempts of a restarted run; remove those of earlier ones")
    times = [report.time for report in reports]
    if max(times) - min(times) > 600:
        notes.append("reports are more than ten minutes apart; some may be of an earlier run")
    return notes


def where_it_was(stacks: str) -> str:
    """The innermost place of the main thread that is the user's own code, from stacks as text.

    Example:
        >>> from shardrt.flight.explaining import where_it_was
        >>> where_it_was('thread MainThread:\\n  File "train.py", line 7, in load\\n    queue.get()')
        'train.py:7 in load'
    """
    found = re.search(r"^thread MainThread:\n(.*?)(?=^thread |\Z)", stacks, re.MULTILINE | re.DOTALL)
    frames = list(_FRAME.finditer(found[1])) if found else []
    own = [frame for frame in frames if not _NOT_THE_USERS.search(frame["file"])]
    if not own:
        return ""
    return f"{own[-1]['file']}:{own[-1]['line']} in {own[-1]['function']}"

"""Reading hang reports, whatever is in the files, and explaining hand-made ones of several situations."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardrt.cli import main
from shardrt.errors import ConfigError
from shardrt.flight import FlightRecorder
from shardrt.flight.explaining import Explanation, explain_reports, where_it_was
from shardrt.flight.reading import read_reports
from shardrt.flight.report import make_report, read_report, report_name, write_report

NOW = 1_000_000.0
DONE = {"kind": "all_gather", "communicator": 4097, "number": 4, "bytes": 64}


def op(kind: str, number: int, state: str = "done", communicator: int = 4097, **more: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "communicator": communicator,
        "number": number,
        "bytes": 64,
        "state": state,
        "issued": NOW - 10 + number / 100,
        **more,
    }


def beat(ago: float, **more: Any) -> dict[str, Any]:
    return {"time": NOW - ago, "pid": 7, "host": "h", "finished": DONE, "under_way": [], **more}


def report(
    folder: Path,
    rank: int,
    operations: Sequence[dict[str, Any]] = (),
    *,
    world_size: int = 3,
    error: tuple[str, str] = ("CommunicationError", "took longer than 4 s"),
    peers: dict[int, dict[str, Any]] | None = None,
    **more: Any,
) -> Path:
    """Write one as a rank would."""
    made = {
        "format": "shardrt-hang",
        "version": 1,
        "rank": rank,
        "world_size": world_size,
        "time": NOW,
        "about": {"backend": {"name": "gloo"}},
        "error": {"type": error[0], "message": error[1]},
        "own": beat(0.0),
        "operations": list(operations),
        "peers": {str(other): words for other, words in (peers or {}).items()},
        "stacks": "",
        **more,
    }
    return write_report(folder, made)


def explained(folder: Path) -> Explanation:
    return explain_reports(read_reports(folder)[0])


WAITING = (op("all_gather", 4), op("reduce_scatter", 5, "failed", waits_for=[1]))


def test_a_silent_rank(tmp_path: Path) -> None:
    for rank in (0, 2):
        report(tmp_path, rank, WAITING, peers={1: beat(21.3)})
    found = explained(tmp_path)
    assert (found.cause, found.guilty) == ("silent", (1,))
    assert "rank 1 is silent (process 7 on h): it was last heard 21.3 s before the others gave up" in found.text
    assert found.ranks[0].waited == "reduce_scatter 5 of communicator 4097 for rank 1"
    assert found.ranks[1].last == "last finished all_gather 4 of communicator 4097, none under way"


@pytest.mark.parametrize(
    ("process", "cause", "advice"), [("stopped", "stopped", "kill -CONT 7"), ("gone", "lost", "dmesg")]
)
def test_what_the_system_said_of_a_silent_rank(tmp_path: Path, process: str, cause: str, advice: str) -> None:
    report(tmp_path, 0, WAITING, peers={1: beat(0.4, process=process), 2: beat(0.2)})
    report(tmp_path, 2, WAITING, peers={1: beat(0.4)})
    found = explained(tmp_path)
    assert (found.cause, found.guilty) == (cause, (1,))
    assert f"rank 1 is {process}" in found.text and advice in found.advice


def test_a_rank_that_was_never_heard(tmp_path: Path) -> None:
    report(tmp_path, 0, WAITING, peers={2: beat(0.1)})
    report(tmp_path, 2, WAITING)
    assert explained(tmp_path).text == "rank 1 was never heard"


def test_a_rank_that_failed_by_itself_beats_all_other_evidence(tmp_path: Path) -> None:
    report(tmp_path, 0, WAITING, error=("PeerError", "rank 0 stops"), peers={2: beat(30.0)})
    report(tmp_path, 1, error=("ValueError", "bad batch"))
    found = explained(tmp_path)
    assert (found.cause, found.guilty, found.text) == ("raised", (1,), "rank 1 failed by itself: ValueError: bad batch")


def test_ranks_that_disagree(tmp_path: Path) -> None:
    for rank in range(3):
        report(tmp_path, rank, error=("HandshakeError", "ranks disagree on lr"))
    assert explained(tmp_path).cause == "disagreed"


def test_a_rank_that_left(tmp_path: Path) -> None:
    for rank in (0, 2):
        report(tmp_path, rank, WAITING, peers={1: beat(9.0, left=True)})
    found = explained(tmp_path)
    assert (found.cause, found.guilty) == ("left", (1,)) and "same number of steps" in found.advice


def test_ranks_that_issue_different_operations_under_one_number(tmp_path: Path) -> None:
    report(tmp_path, 0, [op("all_gather", 4), op("all_gather", 5, "failed")])
    report(tmp_path, 1, [op("all_gather", 4), op("all_reduce", 5, "failed")])
    report(tmp_path, 2, [op("all_gather", 4), op("all_gather", 5, "failed")])
    found = explained(tmp_path)
    assert (found.cause, found.guilty) == ("other calls", (1,))
    assert found.parting is not None and (found.parting.communicator, found.parting.number) == (4097, 5)
    assert "rank 1: all_reduce of 64 bytes" in found.text


def test_ranks_that_issue_operations_of_different_sizes(tmp_path: Path) -> None:
    report(tmp_path, 0, [op("all_gather", 5, "failed")], world_size=2)
    report(tmp_path, 1, [op("all_gather", 5, "failed", bytes=32)], world_size=2)
    found = explained(tmp_path)
    assert (found.cause, found.guilty) == ("other calls", ()), "of two, nobody can tell which is the odd one"


def test_ranks_that_wait_for_each_other_on_two_communicators(tmp_path: Path) -> None:
    report(tmp_path, 0, [op("all_gather", 4), op("all_gather", 5, "failed")])
    report(tmp_path, 1, [op("all_gather", 4), op("all_reduce", 1, "failed", communicator=4096)])
    report(tmp_path, 2, [op("all_gather", 4), op("all_gather", 5, "failed")])
    found = explained(tmp_path)
    assert (found.cause, found.guilty) == ("other calls", (1,)), found
    assert "number 1 of communicator 4096, instead" in found.text or "number 5 of communicator 4097" in found.text


def test_a_ring_that_has_forgotten_more_is_no_difference(tmp_path: Path) -> None:
    report(tmp_path, 0, [op("all_gather", number) for number in range(1, 9)], world_size=2)
    report(tmp_path, 1, [op("all_gather", number) for number in range(5, 9)], world_size=2)
    assert explained(tmp_path).parting is None


def test_a_rank_that_is_elsewhere_is_told_by_its_stacks(tmp_path: Path) -> None:
    stacks = (
        'thread shardrt-heartbeat:\n  File "x.py", line 1, in beat\n'
        'thread MainThread:\n  File "/data/train.py", line 12, in main\n    load()\n'
        '  File "/data/data.py", line 7, in load\n    lock.acquire()\n'
        '  File "/lib/site-packages/torch/utils/data.py", line 3, in get\n    x\n'
    )
    for rank in (0, 2):
        report(tmp_path, rank, WAITING, peers={1: beat(0.3)})
    report(tmp_path, 1, [op("all_gather", 4)], error=("PeerError", "elsewhere"), elsewhere=True, stacks=stacks)
    found = explained(tmp_path)
    assert (found.cause, found.guilty) == ("busy", (1,))
    assert "rank 1 was at /data/data.py:7 in load" in found.text and "raise Runtime(timeout=...)" in found.advice
    assert where_it_was("nothing of the kind") == ""


def test_everybody_waits_at_the_same_place(tmp_path: Path) -> None:
    for rank in range(3):
        report(tmp_path, rank, [op("all_gather", 4), op("reduce_scatter", 5, "failed")])
    assert explained(tmp_path).cause == "slow"


def test_reports_of_several_attempts_and_worlds_are_pointed_out(tmp_path: Path) -> None:
    report(tmp_path, 0, WAITING, attempt="0", peers={1: beat(20.0)})
    report(tmp_path, 2, WAITING, attempt="1", time=NOW + 5000)
    report(tmp_path, 0, world_size=2, time=NOW - 1)
    reports, notes = read_reports(tmp_path)
    assert [one.rank for one in reports] == [0, 2]
    assert notes == ["1 reports are of worlds of other sizes than 3 and left out"]
    assert len(explain_reports(reports).notes) == 2


GOOD: dict[str, Any] = json.loads(
    json.dumps(make_report(FlightRecorder(0, 2), ValueError("x"), peers={1: {"time": 1.0}}, about={}))
)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": "other"}, 'has no "format": "shardrt-hang"'),
        ({"version": 2}, "format version 2, this shardrt reads 1"),
        ({"rank": "0"}, "rank is '0' and no whole number"),
        ({"rank": 5}, "rank 5 of 2"),
        ({"time": None}, "time is None and no number"),
        ({"time": float("nan")}, "time is nan and no number"),
        ({"error": []}, "error is no mapping"),
        ({"own": {}}, "time is None"),
        ({"peers": {"9": {"time": 1.0}}}, "a rank '9' of 2"),
        ({"peers": {"1": {"time": "x"}}}, "time is 'x'"),
        ({"peers": {"1": {"time": 1.0, "under_way": 3}}}, "under_way is no list"),
        ({"peers": {"1": {"time": 1.0, "finished": {"kind": 3}}}}, "an operation has no kind"),
        ({"operations": {}}, "its operations are no list"),
        ({"operations": [1]}, "an operation has no kind"),
        ({"operations": [{"kind": "x", "communicator": 1, "number": None}]}, "number is None"),
        ({"operations": [{"kind": "x", "communicator": 1, "number": 1, "state": "odd"}]}, "state 'odd'"),
        ({"operations": [{"kind": "x", "communicator": 1, "number": 1, "waits_for": 1}]}, "waits_for is no list"),
    ],
)
def test_what_is_not_a_report_is_refused_with_a_reason(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    path = tmp_path / report_name(0, 2)
    path.write_text(json.dumps(GOOD), encoding="utf-8")
    assert read_report(path).world_size == 2
    path.write_text(json.dumps({**GOOD, **change}), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_report(path)
    assert why in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'"x"', b"[" * 100_000])
def test_damaged_files_are_noted_and_the_rest_is_explained(tmp_path: Path, content: bytes) -> None:
    (tmp_path / report_name(2, 3)).write_bytes(content)
    done = CliRunner().invoke(main, ["doctor", "--hang", str(tmp_path)])
    assert done.exit_code == 1 and "no hang report in" in done.output
    report(tmp_path, 0, WAITING, peers={1: beat(20.0), 2: beat(0.1)})
    done = CliRunner().invoke(main, ["doctor", "--hang", str(tmp_path)])
    assert done.exit_code == 0 and "Note: " in done.output and "is not a hang report of shardrt" in done.output
    assert "Likely cause (silent): rank 1" in done.output


def test_no_directory_and_no_reports_are_clear_messages(tmp_path: Path) -> None:
    missing = CliRunner().invoke(main, ["doctor", "--hang", str(tmp_path / "no"), "--json"])
    assert missing.exit_code == 1 and "is not a directory" in json.loads(missing.output)["error"]
    empty = CliRunner().invoke(main, ["doctor", "--hang", str(tmp_path)])
    assert empty.exit_code == 1 and "SHARDRT_HANG_DIR=DIR" in empty.output


def test_a_report_replaces_an_earlier_one_wholly(tmp_path: Path) -> None:
    for text in ("first", "second"):
        write_report(tmp_path, make_report(FlightRecorder(0, 2), ValueError(text), peers={}, about={"x": object}))
    [path] = tmp_path.iterdir()
    found = read_report(path)
    assert found.error == "second" and abs(found.time - time.time()) < 60

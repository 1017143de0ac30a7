"""Recording: what a timeline keeps, the file it writes, and when that is written."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrt.errors import ConfigError
from shardrt.timeline import LANES, Timeline
from shardrt.timeline.recording import Recording, timeline_directory


def written(timeline: Timeline, path: Path) -> dict[str, Any]:
    timeline.write(path)
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    return document


def test_it_is_a_chrome_trace(tmp_path: Path) -> None:
    timeline = Timeline(1, 4, about={"schedule": {"name": "bucket"}, "odd": {1, 2}})
    timeline.span("trainer", "step", 5.0, 5.25, number=3)
    timeline.operation("reduce_scatter", 5.0, 5.125, {"bytes": 4096})
    timeline.operation("all_gather", 5.2, 5.3, {})
    timeline.operation("broadcast", 5.4, 5.5, {})
    document = written(timeline, tmp_path / "t.json")
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    other = document["otherData"]
    assert (other["format"], other["version"], other["rank"], other["world_size"]) == ("shardrt-timeline", 1, 1, 4)
    assert other["schedule"] == {"name": "bucket"} and other["host"] and other["spans_dropped"] == 0
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert [(span["cat"], span["name"], span["dur"]) for span in spans] == [
        ("trainer", "step", 250_000),
        ("reduce", "reduce_scatter", 125_000),
        ("gather", "all_gather", 100_000),
        ("other", "broadcast", 100_000),
    ]
    assert spans[0]["args"] == {"thread": "MainThread", "number": 3}
    for span in spans:
        assert span["pid"] == 1 and all(isinstance(span[key], int) for key in ("tid", "ts", "dur"))
    names = {event["tid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert [names[tid] for tid in sorted(names)] == list(LANES)
    assert {span["tid"]: span["cat"] for span in spans}.items() <= names.items()
    [process] = [event for event in document["traceEvents"] if event["name"] == "process_name"]
    assert process["args"]["name"] == "rank 1"


def test_times_are_of_the_wall_clock(tmp_path: Path) -> None:
    before = time.time()
    timeline = Timeline(0, 1)
    now = time.perf_counter()
    timeline.span("trainer", "step", now, now + 0.5)
    span = next(event for event in written(timeline, tmp_path / "t.json")["traceEvents"] if event["ph"] == "X")
    assert before * 1e6 - 1e3 <= span["ts"] <= time.time() * 1e6 + 1e3


@given(st.lists(st.tuples(st.sampled_from(LANES), st.integers(0, 30), st.integers(0, 12)), max_size=25))
def test_spans_of_a_row_never_overlap_halfway(spans: list[tuple[str, int, int]]) -> None:
    """Viewers drop a span that overlaps another of its thread number without being inside it."""
    from shardrt.timeline.chrome import _events

    timeline = Timeline(0, 1)
    for lane, start, wide in spans:
        timeline.span(lane, "x", timeline.clock.perf + start / 1e6, timeline.clock.perf + (start + wide) / 1e6)
    rows: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in _events(timeline, timeline.spans()):
        if event["ph"] == "X":
            assert event["tid"] // 100 == LANES.index(event["cat"]) + 1
            rows[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, rows.values())) == len(spans)
    for row in rows.values():
        for index, (start, end) in enumerate(row):
            for other_start, other_end in row[index + 1 :]:
                apart = other_start >= end or other_end <= start
                inside = start <= other_start and other_end <= end
                assert apart or inside


def test_beyond_the_limit_spans_are_counted(tmp_path: Path) -> None:
    timeline = Timeline(0, 1, limit=3)
    for index in range(5):
        timeline.span("other", "x", index, index + 0.5)
    document = written(timeline, tmp_path / "t.json")
    assert (len(timeline), timeline.dropped, document["otherData"]["spans_dropped"]) == (3, 2, 2)


def test_an_unknown_lane_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown lane 'tariner' of a timeline; lanes: trainer, update"):
        Timeline(0, 1).span("tariner", "step", 0.0, 1.0)


def test_odd_times_and_details_do_not_spoil_the_file(tmp_path: Path) -> None:
    timeline = Timeline(0, 1)
    timeline.span("trainer", "backwards", 2.0, 1.0, ratio=math.nan, path=Path("a"), many=(1, {2: math.inf}))
    timeline.span("trainer", "never", math.nan, 1.0)
    timeline.span("trainer", "never", 1.0, math.inf)
    [span] = [event for event in written(timeline, tmp_path / "t.json")["traceEvents"] if event["ph"] == "X"]
    assert span["dur"] == 0
    assert span["args"] == {"thread": "MainThread", "ratio": "nan", "path": "a", "many": [1, {"2": "inf"}]}


def test_threads_record_at_once_and_under_their_names() -> None:
    timeline = Timeline(0, 1)

    def record() -> None:
        for index in range(500):
            timeline.span("update", "update", index, index + 1)
        timeline.waited("all_gather", 0.0, 1.0)
        with timeline.noting(bucket=1):
            assert timeline.noted() == {"bucket": 1}

    threads = [threading.Thread(target=record, name=name) for name in ("shardrt-a", "shardrt-b", "mine")]
    for thread in threads:
        thread.start()
    with timeline.noting(bucket=7), timeline.noting(kind="x"):
        assert timeline.noted() == {"bucket": 7, "kind": "x"}
    for thread in threads:
        thread.join(timeout=20)
    assert timeline.noted() == {}
    assert len(timeline) == 3 * 501
    waits = {span[4]: span[0] for span in timeline.spans() if span[1] == "wait"}
    assert waits == {"shardrt-a": "update", "shardrt-b": "update", "mine": "trainer"}


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    timeline = Timeline(0, 1)
    timeline.write(path)
    whole = path.read_text(encoding="utf-8")

    def broken(*_: Any, **__: Any) -> str:
        raise OSError("disk full")

    monkeypatch.setattr("json.JSONEncoder.encode", broken)
    with pytest.raises(OSError, match="disk full"):
        timeline.write(path)
    assert path.read_text(encoding="utf-8") == whole
    assert list(tmp_path.iterdir()) == [path]


def test_the_argument_wins_over_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDRT_TIMELINE", raising=False)
    assert timeline_directory(None) is None
    monkeypatch.setenv("SHARDRT_TIMELINE", str(tmp_path / "a"))
    assert timeline_directory(None) == tmp_path / "a"
    assert timeline_directory(str(tmp_path / "b" / "c")) == tmp_path / "b" / "c"
    assert (tmp_path / "b" / "c").is_dir() and list((tmp_path / "b" / "c").iterdir()) == []


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_directory_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    (tmp_path / "file").write_text("")
    name = str(tmp_path / "file" / "inside")
    monkeypatch.setenv("SHARDRT_TIMELINE", name)
    with pytest.raises(ConfigError) as caught:
        timeline_directory(None if by_variable else name)
    assert str(caught.value).startswith(
        f"{'SHARDRT_TIMELINE=' if by_variable else 'timeline='}{name!r}: no file can be"
    )


def test_a_disk_that_is_full_in_the_end_is_told_and_not_raised(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    recording = Recording(directory, rank=0, world_size=1)
    directory.rmdir()
    assert "No such file" in (recording.close() or "")
    assert recording.close() is None


NEVER_CLOSED = """
import sys
import shardrt
for _ in range(2):
    rt = shardrt.Runtime(timeline=sys.argv[1])
    rt.timeline.span("trainer", "step", 1.0, 2.0)
shardrt.Runtime(timeline=sys.argv[1])
"""


def test_a_runtime_that_was_never_closed_writes_at_exit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NEVER_CLOSED, "run"], cwd=tmp_path, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "timeline-rank0-2.json",
        "timeline-rank0.json",
    ]

"""Timeline files that anyone may have written: each is read, or refused in words."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import shardrt.timeline.reading
from shardrt.cli import main
from shardrt.errors import ConfigError
from shardrt.timeline import Timeline
from shardrt.timeline.reading import read_timeline, read_timelines

GOOD: dict[str, Any] = {
    "otherData": {"format": "shardrt-timeline", "version": 1, "rank": 0, "world_size": 2, "host": "here"},
    "traceEvents": [
        {"ph": "M", "pid": 0, "tid": 100, "name": "thread_name", "args": {"name": "trainer"}},
        {"ph": "X", "pid": 0, "tid": 100, "ts": 1000, "dur": 10, "name": "step", "cat": "trainer", "args": {}},
    ],
}


def changed(*path: Any, to: Any) -> dict[str, Any]:
    document = copy.deepcopy(GOOD)
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return document


def written(folder: Path, document: Any, name: str = "timeline-rank0.json") -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    timeline = Timeline(1, 3, about={"schedule": {"name": "bucket", "depth": 2}, "runtime": 2}, limit=2)
    timeline.span("reduce", "reduce_scatter", 5.0, 5.5, bytes=12, deep=[1, 2])
    timeline.span("trainer", "step", 4.0, 6.0)
    timeline.span("trainer", "step", 6.0, 7.0)
    timeline.write(tmp_path / "x.json")
    found = read_timeline(tmp_path / "x.json")
    assert (found.rank, found.world_size, found.runtime, found.dropped) == (1, 3, 2, 1)
    assert found.host == timeline.host and found.about["schedule"]["name"] == "bucket"
    assert [(one.lane, one.name, one.end - one.start, one.thread) for one in found.spans] == [
        ("trainer", "step", 2_000_000, "MainThread"),
        ("reduce", "reduce_scatter", 500_000, "MainThread"),
    ]
    assert found.spans[1].start - found.spans[0].start == 1_000_000
    assert dict(found.spans[1].details) == {"bytes": 12, "deep": "[1, 2]"}


BROKEN: dict[str, tuple[Any, str]] = {
    "empty": ("", "not valid JSON"),
    "binary": ("\x00\x01", "not valid JSON"),
    "half": (json.dumps(GOOD)[:-20], "not valid JSON"),
    "a list": ([], "it is a list and not an object"),
    "a number": ("7", "it is a int and not an object"),
    "deep": ("[" * 200_000, "nested too deeply|not valid JSON"),
    "not a number": (json.dumps(GOOD).replace("1000", "NaN"), "NaN is no number"),
    "endless": (json.dumps(GOOD).replace("1000", "1e999"), r"has ts = inf; it must be microseconds"),
    "negative": (changed("traceEvents", 1, "dur", to=-5), r"traceEvents\[1\] has dur = -5"),
    "too late": (changed("traceEvents", 1, "ts", to=2**60), "has ts = "),
    "digits": (json.dumps(GOOD).replace("1000", "1" * 5000), "not valid JSON"),
    "text for a time": (changed("traceEvents", 1, "ts", to="5"), "has ts = '5'"),
    "truth for a time": (changed("traceEvents", 1, "ts", to=True), "has ts = True"),
    "no time": (changed("traceEvents", 1, "dur", to=None), "has dur = None"),
    "no events": (changed("traceEvents", to=None), "it has no list of traceEvents"),
    "an event that is none": (changed("traceEvents", 1, to=3), r"traceEvents\[1\] is no complete event"),
    "another kind of event": (changed("traceEvents", 1, "ph", to="B"), "is no complete event"),
    "another lane": (changed("traceEvents", 1, "cat", to="gpu"), "is in lane 'gpu'; lanes: trainer"),
    "a lane that is a list": (changed("traceEvents", 1, "cat", to=["trainer"]), "is in lane "),
    "arguments that are none": (changed("traceEvents", 1, "args", to=[1]), "has args that are no object"),
    "another program's": (changed("otherData", to={}), "it was not recorded by shardrt"),
    "nothing about it": (changed("otherData", to=3), "it was not recorded by shardrt"),
    "a later version": (changed("otherData", "version", to=2), "it has format version 2, this shardrt reads 1"),
    "a rank too high": (changed("otherData", "rank", to=2), "its rank is 2; it must be a whole number from 0 to 1"),
    "a rank in words": (changed("otherData", "rank", to="zero"), "its rank is 'zero'"),
    "no ranks": (changed("otherData", "world_size", to=0), "its world_size is 0"),
    "a runtime of none": (changed("otherData", "runtime", to=0), "its runtime is 0"),
}


@pytest.mark.parametrize(("document", "told"), BROKEN.values(), ids=BROKEN)
def test_broken_files_are_refused_in_words(tmp_path: Path, document: Any, told: str) -> None:
    path = written(tmp_path, document)
    with pytest.raises(ConfigError, match=told) as caught:
        read_timeline(path)
    assert str(caught.value).startswith(f"{str(path)!r} is not a timeline that can be read: ")
    assert len(str(caught.value)) < 700
    result = CliRunner().invoke(main, ["trace", str(path)])
    assert (result.exit_code, result.stderr.startswith("error: ")) == (1, True)
    assert list(tmp_path.iterdir()) == [path]


def test_huge_files_are_not_even_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, GOOD)
    os.truncate(path, shardrt.timeline.reading.MOST_BYTES + 1)  # a hole: takes no space
    with pytest.raises(ConfigError, match=r"it has 1,073,741,825 bytes, more than"):
        read_timeline(path)
    monkeypatch.setattr(shardrt.timeline.reading, "MOST_RANKS", 0)
    with pytest.raises(ConfigError, match="more than the 0 that can be looked at"):
        read_timelines([path])


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'.*nowhere' does not exist; give timeline files, or a directory"):
        read_timelines([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match=r"has no timeline-rank\*.json; record some with Runtime\(timeline="):
        read_timelines([tmp_path])


def test_files_of_different_runs_are_not_mixed(tmp_path: Path) -> None:
    written(tmp_path, GOOD)
    written(tmp_path, GOOD, "timeline-rank1.json")
    with pytest.raises(ConfigError, match="are both of rank 0, so they are of different runs"):
        read_timelines([tmp_path])
    document = changed("otherData", "rank", to=1)
    document["otherData"]["world_size"] = 4
    written(tmp_path, document, "timeline-rank1.json")
    with pytest.raises(ConfigError, match=r"is of a run on 2 ranks and .* of one on 4"):
        read_timelines([tmp_path])


def test_files_and_directories_are_merged_by_rank_and_read_once(tmp_path: Path) -> None:
    second = written(tmp_path, changed("otherData", "rank", to=1), "timeline-rank1.json")
    first = written(tmp_path, GOOD)
    written(tmp_path, "not one of ours", "timeline-ranking.json")
    assert [one.path for one in read_timelines([second, first])] == [first, second]
    assert [one.rank for one in read_timelines([tmp_path, first])] == [0, 1]


def test_texts_are_cut_and_made_printable(tmp_path: Path) -> None:
    document = changed("traceEvents", 1, "name", to="a\x1b[31m\ud800" + "x" * 1000)
    document["traceEvents"][1]["args"] = {f"k{index}": 10**30 for index in range(99)}
    [span] = read_timeline(written(tmp_path, document)).spans
    assert span.name.startswith("a\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}xxx") and len(span.name) == 300
    assert len(span.details) == 32 and span.details["k0"] == str(10**30)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["otherData", "traceEvents", "event", "args", "rank", "ts", "cat", "name", "host"]), JSON)
def test_whatever_is_in_a_file_is_read_or_refused(tmp_path_factory: Any, place: str, value: Any) -> None:
    document = copy.deepcopy(GOOD)
    event = document["traceEvents"][1]
    if place in ("otherData", "traceEvents"):
        document[place] = value
    elif place == "event":
        document["traceEvents"][1] = value
    else:
        (document["otherData"] if place in ("rank", "host") else event)[place] = value
    path = written(tmp_path_factory.mktemp("any"), document)
    try:
        found = read_timeline(path)
    except ConfigError:
        return
    json.dumps([found.host, dict(found.about), [dict(one.details) for one in found.spans]], allow_nan=False)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "timeline-rank0.json")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_timelines([tmp_path / "timeline-rank0.json"])

"""``shardrt trace``: its table, its document and its page, also when names in files are hostile."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardrt.cli import main
from shardrt.config import tomllib
from shardrt.timeline import Timeline
from shardrt.timeline.analysis import analyse
from shardrt.timeline.page import render_page
from shardrt.timeline.reading import read_timelines

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>@data@ \u2028'\"&amp;"


def record(folder: Path, *, ranks: int = 2, steps: int = 4, name: str = "reduce_scatter", runtime: int = 1) -> Path:
    """Per step and rank 10 ms: 6 of backward, in which 4 are reduced; then 2 reduced and 1 gathered inside the step."""
    folder.mkdir(exist_ok=True)
    for rank in range(ranks):
        timeline = Timeline(rank, ranks, about={"schedule": {"name": name}, "runtime": runtime})
        for step in range(steps):
            zero = timeline.clock.perf + step * 0.010
            timeline.span("trainer", "backward", zero, zero + 0.006)
            timeline.span("reduce", name, zero + 0.002, zero + 0.008, bytes=4096, bucket=name)
            timeline.span("trainer", "step", zero + 0.006, zero + 0.010, number=step + 1)
            timeline.span("update", "update", zero + 0.008, zero + 0.009)
            timeline.span("gather", "all_gather", zero + 0.009, zero + 0.010)
        timeline.write(folder / f"timeline-rank{rank}{'' if runtime == 1 else f'-{runtime}'}.json")
    return folder


def trace(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["trace", *map(str, arguments)])


class Elements(HTMLParser):
    """The elements of a page, and the text of its scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._inside: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = (dict(attrs).get("id") or tag) if tag in ("script", "style") else None

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is not None:
            self.texts[self._inside] = self.texts.get(self._inside, "") + data


def test_the_table(tmp_path: Path) -> None:
    result = trace(record(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    assert "schedule reduce_scatter: 57.1% of communication hidden" in result.stdout
    rows = [re.split(r"\s*│\s*", line.strip("│")) for line in result.stdout.splitlines() if line.startswith("│")]
    expected = ["10.0", "7.00", "6.00", "1.00", "3.00", "3.00", "57.1%"]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["0, first", "1", *expected],
        ["1, first", "1", *expected],
        ["0", "3", *expected],
        ["1", "3", *expected],
        ["all", "3", *expected],
    ]
    assert max(map(len, result.stdout.splitlines()[1:-2])) <= 80
    assert (tmp_path / "run" / "timeline.html").exists()


def test_the_document(tmp_path: Path) -> None:
    run = record(tmp_path / "run")
    result = trace(run, "--json", "--steps", "2:3", "--html", tmp_path / "page.html")
    document = json.loads(result.stdout)
    assert document["steps"] == [2, 3] and document["page"] == str(tmp_path / "page.html")
    assert document["overall"] == {
        "steps": 2,
        "duration_ms": 10.0,
        "communication_ms": 7.0,
        "reduce_ms": 6.0,
        "gather_ms": 1.0,
        "waited_ms": 3.0,
        "exposed_ms": 3.0,
        "hidden": 0.5714,
    }
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert document["ranks"][0]["first_step"]["steps"] == 1
    assert not (run / "timeline.html").exists()
    assert json.loads(trace(run, "--json", "--no-html").stdout)["page"] is None


def test_one_file_of_two(tmp_path: Path) -> None:
    result = trace(record(tmp_path / "run") / "timeline-rank1.json", "--no-html")
    assert result.exit_code == 0 and "Note: The run had 2 ranks; no file of: 0." in result.stdout


def test_several_runtimes_are_told_apart(tmp_path: Path) -> None:
    run = record(record(tmp_path / "run"), runtime=2, name="second", steps=7)
    assert "2 runtimes were recorded; this is runtime 1." in trace(run, "--no-html").stdout
    assert "schedule second" in trace(run, "--no-html", "--runtime", 2).stdout
    result = trace(run, "--runtime", 3)
    assert (result.exit_code, result.stderr) == (1, "error: runtime 3 was not recorded here; there are: 1, 2\n")


@pytest.mark.parametrize("steps", ["", ":", "a", "1-2", "0:3", "-1", "1:2:3", "9" * 30])
def test_ranges_of_steps_that_cannot_be_meant(tmp_path: Path, steps: str) -> None:
    result = trace(record(tmp_path / "run"), "--steps", steps)
    assert result.exit_code == 2 and "Invalid value for '--steps'" in result.stderr


def test_pages_that_cannot_be_written(tmp_path: Path) -> None:
    run = record(tmp_path / "run")
    result = trace(run, "--html", tmp_path / "nowhere" / "page.html")
    assert result.exit_code == 1 and "choose with --html FILE, or --no-html" in result.stderr
    assert trace(run, "--html", tmp_path / "page.html", "--no-html").exit_code == 1


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    run = record(tmp_path / "run")
    assert trace(run).exit_code == 0
    page = (run / "timeline.html").read_text(encoding="utf-8")
    elements = Elements(page)
    [policy] = [one["content"] for _, one in elements.found if one.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'; ")
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(elements.texts[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert "unsafe" not in policy
    for tag, attributes in elements.found:
        assert tag not in ("link", "iframe", "img", "object") and not {"src", "href", "style"} & set(attributes), tag
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
    assert "://" not in page and "@import" not in page and "url(" not in page
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", page)


def test_names_from_files_cannot_become_script(tmp_path: Path) -> None:
    run = record(tmp_path / "run", name=HOSTILE)
    plain = record(tmp_path / "plain")
    assert trace(run).exit_code == trace(plain).exit_code == 0
    page, usual = ((each / "timeline.html").read_text(encoding="utf-8") for each in (run, plain))
    assert "<script>alert" not in page and "<img" not in page
    elements = Elements(page)
    assert [tag for tag, _ in elements.found] == [tag for tag, _ in Elements(usual).found]
    assert "<" not in elements.texts["data"]
    shown = json.loads(elements.texts["data"])
    assert any(name.startswith("</script><script>alert(1)</script><img") for name in shown["names"])


def test_the_data_of_the_page(tmp_path: Path) -> None:
    run = record(tmp_path / "run", ranks=1)
    assert trace(run).exit_code == 0
    data = json.loads(Elements((run / "timeline.html").read_text(encoding="utf-8")).texts["data"])
    assert (data["first"], data["last"], data["steps"]) == (2, 4, True)
    [rank] = data["ranks"]
    assert len(rank["windows"]) == len(rank["figures"]) == 4
    assert rank["figures"][1] == pytest.approx([10_000, 7_000, 6_000, 1_000, 3_000, 3_000], abs=3)
    rows = {row["lane"]: row for row in rank["rows"]}
    assert [data["names"][index] for index in rows["trainer"]["name"]] == ["backward", "step"] * 4
    assert ["bytes", 4096] in data["details"][rows["reduce"]["info"][0]]
    for row in rank["rows"]:
        ends = [start + wide for start, wide in zip(row["start"], row["span"], strict=True)]
        assert all(end <= start for end, start in zip(ends, row["start"][1:], strict=False)), "rows must not overlap"


def test_pages_stay_bounded(tmp_path: Path) -> None:
    analyses = [analyse(one) for one in read_timelines([record(tmp_path / "run", ranks=1, steps=10)])]
    page = render_page(analyses, steps=(5, 10), most_drawn=12)
    data = json.loads(Elements(page).texts["data"])
    drawn = [row for row in data["ranks"][0]["rows"] if row["start"]]
    assert sum(len(row["start"]) for row in drawn) == 12
    assert min(start + wide for row in drawn for start, wide in zip(row["start"], row["span"], strict=True)) >= 39_990
    assert len(data["ranks"][0]["figures"]) == 10
    assert data["notes"][0].startswith("There are 50 spans, too many for a page: 12 from step 5 on are drawn.")


def test_a_recording_of_nothing(tmp_path: Path) -> None:
    Timeline(0, 1).write(tmp_path / "timeline-rank0.json")
    result = trace(tmp_path)
    assert result.exit_code == 0 and "no communication was recorded" in result.stdout


def test_the_page_is_part_of_the_package() -> None:
    root = Path(__file__).parents[2]
    packaged = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    parts = {path.name for path in (root / "shardrt" / "timeline").iterdir() if path.suffix in (".html", ".css", ".js")}
    assert set(packaged["package-data"]["shardrt.timeline"]) == parts

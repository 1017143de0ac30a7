"""The page of ``shardrt bench all``, its Markdown and its tables: whole, by themselves, and safe to open."""

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

from shardrt.bench.markdown import render_markdown
from shardrt.bench.page import render_page
from shardrt.bench.page_charts import ticks
from shardrt.bench.telling import headlines
from shardrt.cli import main
from shardrt.cli.full import is_well, show_full
from shardrt.config import tomllib
from tests.unit.bench_document import MISSING, document_of, left_out, measured_scenario

HOSTILE = "</style></svg><script>alert(1)</script><img src=x onerror=alert(2)>@style@ '\"&amp;|"
NO_ROOT = "an emulated link needs root, and this is user 1000; run it with sudo"


class Elements(HTMLParser):
    """The elements of a page, what is left open, and all its text."""

    EMPTY = ("meta", "rect", "line", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.EMPTY or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag == "line" and self.open[-1] != "line":
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    fast = {"step_seconds": [0.75, 0.75]}
    return document_of(
        measured_scenario("loopback-2", {"zero1/priority/gloo": fast}),
        measured_scenario("hosts-1gbit-2"),
        left_out("hosts-10gbit-2", NO_ROOT),
    )


@pytest.fixture(scope="module")
def page(document: dict[str, Any]) -> str:
    return render_page(document)


def test_the_page_needs_nothing_else_and_runs_nothing(page: str) -> None:
    elements = Elements(page)
    tags = {tag for tag, _ in elements.found}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "video", "audio"}
    for tag, attributes in elements.found:
        assert not any(name.startswith("on") or name in ("src", "style") for name in attributes), tag
        assert attributes.get("href", "#").startswith("#"), attributes
    assert "url(" not in page and "@import" not in page and "http" not in page.replace("http-equiv", "")


def test_the_page_allows_its_own_style_and_nothing_more(page: str) -> None:
    style = page.partition("<style>")[2].partition("</style>")[0]
    [policy] = [found["content"] for tag, found in Elements(page).found if tag == "meta" and "http-equiv" in found]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def test_every_row_of_every_scenario_is_in_plot_and_table(page: str, document: dict[str, Any]) -> None:
    for scenario in document["scenarios"][:2]:
        section = page.partition(f'id="s-{scenario["name"]}"')[2].partition("</section>")[0]
        plot, _, table = section.partition("<table>")
        for row in scenario["contestants"]:
            assert plot.count(f">{row['label']}</text>") == 1
            assert table.count(f">{row['label']}</th>") == 1
        assert plot.count('<rect class="compute"') == len(scenario["contestants"])
        for kind in ("exposed", "update", "memory", "traffic"):
            assert plot.count(f'<rect class="{kind}') == len(scenario["contestants"]), kind
        assert ('class="limit"' in plot) == (scenario["link"] != "none")


def test_what_is_missing_is_named_with_the_reason(page: str) -> None:
    text = Elements(page).text
    assert text.count(f"DeepSpeed, stage 1, DeepSpeed, stage 2, DeepSpeed, stage 3: {MISSING}") == 2
    assert text.count(NO_ROOT) == 2  # at the top, and in its own place
    assert "Two hosts at 10 Gbit/s, 2 ranks left out" in text


def test_hostile_text_stays_text() -> None:
    scenario = measured_scenario("small-buckets")
    for field in ("title", "about", "name"):
        scenario[field] = HOSTILE
    for row in scenario["contestants"]:
        row["label"] = row["backend"] = HOSTILE
    scenario["missing"] = [{"name": HOSTILE, "label": HOSTILE, "reason": HOSTILE}]
    failed = left_out("loopback-4", HOSTILE, state="failed")
    document = document_of(scenario, failed, command=HOSTILE) | {"machine": HOSTILE, "backends": [HOSTILE]}
    page = render_page(document)
    elements = Elements(page)
    assert not {tag for tag, _ in elements.found} & {"script", "img"}
    assert elements.open == []
    assert page.count("<style>") == page.count("</style>") == 1
    assert HOSTILE in elements.text  # all of it, and nothing of it was taken for a place to fill
    markdown = render_markdown(document)
    assert all(line.count("|") - line.count("\\|") in (0, 6, 11) for line in markdown.splitlines())


def test_elements_are_closed_and_ids_are_unique(page: str) -> None:
    elements = Elements(page)
    assert elements.open == []
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {attributes["href"] for tag, attributes in elements.found if tag == "a"}
    assert targets <= {f"#{one}" for one in ids} and len(targets) == 3


def test_the_headlines_take_the_fastest_of_ours(document: dict[str, Any]) -> None:
    found = {(one.level, one.rival): one for one in headlines(document["scenarios"][0])}
    first = found["zero1", "DDP + torch ZeRO"]
    assert (first.ours, first.time, first.memory) == ("shardrt ZeRO-1, priority, gloo", 0.6, 1.0)
    assert {rival for level, rival in found if level == "zero3"} == {"FSDP2, reshard", "FSDP1, FULL_SHARD"}


def test_where_nobody_counts_the_page_says_so() -> None:
    blind = {"peak_bytes": None, "wire_bytes": None}
    names = ("ddp_adamw", "ddp_torch_zero", "zero1/priority/gloo")
    scenario = measured_scenario("small-buckets", dict.fromkeys(names, blind))
    page = render_page(document_of(scenario))
    assert page.count(">not counted here<") == 2 * len(names)
    json.dumps(scenario, allow_nan=False)


def test_a_page_of_nothing_is_a_page() -> None:
    page = render_page(document_of(left_out("hosts-1gbit-2", NO_ROOT)))
    assert "Nothing was measured." in page and NO_ROOT in page


def test_tables_fit_a_terminal_and_name_who_is_missing(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show_full(document)
    shown = capsys.readouterr().out
    assert "…" not in shown  # nothing is cut in 80 columns
    for scenario in document["scenarios"][:2]:
        assert all(row["label"] in shown for row in scenario["contestants"])
    assert shown.count("missing") == 6 and MISSING in shown and NO_ROOT in shown
    assert "The wire's limit: 32.0 and 48.0 ms" in shown


def test_markdown_has_every_row(document: dict[str, Any]) -> None:
    markdown = render_markdown(document)
    for scenario in document["scenarios"][:2]:
        part = markdown.partition(f"### {scenario['title']}\n")[2].partition("\n### ")[0]
        assert all(row["label"] in part for row in scenario["contestants"])
    assert f"Left out: {NO_ROOT}" in markdown
    for table in re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_an_earlier_run_is_shown_in_every_form(document: dict[str, Any], page: str, tmp_path: Path) -> None:
    kept = tmp_path / "run.json"
    kept.write_text(json.dumps(document))
    forms = ("--html", str(tmp_path / "run.html"), "--markdown", str(tmp_path / "run.md"))
    done = CliRunner().invoke(main, ["bench", "all", "--from", str(kept), *forms])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "run.html").read_text(encoding="utf-8") == page
    assert (tmp_path / "run.md").read_text(encoding="utf-8") == render_markdown(document)


@pytest.mark.parametrize(
    ("text", "told"),
    [("[]", "its kind is None"), ("{", "cannot be read as JSON"), ('{"kind": "x"}', "its kind is 'x'")],
)
def test_what_is_no_document_is_refused(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text(text)
    done = CliRunner().invoke(main, ["bench", "all", "--from", str(tmp_path / "odd.json")])
    assert done.exit_code == 1 and told in done.stderr


def test_who_trains_something_else_is_told_and_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = {"zero1/sync/gloo": {"largest_difference": 1e-3}}
    document = document_of(measured_scenario("few-large", odd))
    assert not is_well(document) and is_well(document_of(left_out("few-large", "no")))
    assert not is_well(document_of(left_out("few-large", "a rank died", state="failed")))
    told = "shardrt ZeRO-1, sync, gloo: did not train what DDP + AdamW trains."
    assert told in Elements(render_page(document)).text and told in render_markdown(document)
    show_full(document)
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("most", [0.0, 0.3, 1.0, 9.99, 1234.5, 8e6])
def test_axes_have_few_round_numbers_within_reach(most: float) -> None:
    found = ticks(most)
    assert found[0] == 0 and found[-1] <= most and len(found) <= 6
    assert most == 0 or len(found) >= 3


def test_the_page_is_shipped() -> None:
    root = Path(__file__).parents[2]
    shipped = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    found = {path.name for path in (root / "shardrt" / "bench").iterdir() if path.suffix in (".html", ".css", ".js")}
    assert set(shipped["shardrt.bench"]) == found

"""A document of ``shardrt bench all`` as one HTML page that needs nothing else: no network, no other file, no script.

Note [Text is text]: every text of a document is escaped where it is put into the page, and the page forbids itself
scripts, pictures and everything that comes from elsewhere; its one style sheet is named by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from shardrt.bench.page_charts import draw_ratio, draw_scenario
from shardrt.bench.telling import (
    HEADLINE_RIVALS,
    LEAST_MEANT,
    Document,
    Headline,
    absences,
    by_level,
    complaints,
    facts,
    headlines,
    measured,
    megabytes,
    milliseconds,
    ratio,
    setting,
)
from shardrt.bench.ways import ALL_PEERS

_LEVELS = {"zero1": "ZeRO-1", "zero3": "full_shard"}
_LEAD = (
    "Time of a step of shardrt in times of a peer's, in the same run: below 1 shardrt is faster. Of several schedules "
    "over one backend the fastest is shown, and named; all of them are in the plots below. Memory is the ratio of "
    "peaks. The mark in each bar is at 1."
)
_UNSAFE_IN_IDS = re.compile(r"[^a-z0-9-]+")


def render_page(document: Document) -> str:
    """The page."""
    style = _part("page.css")
    there = measured(document)
    parts = {
        "title": "shardrt beside its peers",
        "heading": "shardrt beside its peers",
        "command": escape(document["command"] or "shardrt bench all"),
        "facts": "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts(document)
        ),
        "style": style,
        "style-hash": _hash(style),
        "lead": _LEAD if there else "Nothing was measured.",
        "summary": _summary(there) if there else "",
        "absent": _absent_scenarios(document),
        "contents": "".join(
            f'<li><a href="#{_id(one)}">{escape(one["title"])}</a></li>' for one in document["scenarios"]
        ),
        "scenarios": "\n".join(_scenario(one) for one in document["scenarios"]),
    }
    # In one pass: what is put in is never looked at for further places.
    return re.sub(r"@([a-z-]+)@", lambda found: parts[found[1]], _part("page.html"))


def _summary(scenarios: Sequence[Document]) -> str:
    columns = [(level, rival) for level, rivals in HEADLINE_RIVALS.items() for rival in rivals]
    found = {(one.scenario, one.backend, one.level, one.rival): one for each in scenarios for one in headlines(each)}
    rivals = {one.rival for one in found.values()}
    columns = [(level, rival) for level, rival in columns if ALL_PEERS[rival] in rivals]
    heads = "".join(f'<th scope="col">{_LEVELS[level]} / {escape(ALL_PEERS[rival])}</th>' for level, rival in columns)
    rows = []
    for scenario in scenarios:
        backends = dict.fromkeys(row["backend"] for row in scenario["contestants"] if row["ours"])
        for number, backend in enumerate(backends):
            title = f'<a href="#{_id(scenario)}">{escape(scenario["title"])}</a>' if number == 0 else ""
            cells = "".join(
                _ratio_cell(found.get((scenario["name"], backend, level, ALL_PEERS[rival]))) for level, rival in columns
            )
            rows.append(f'<tr><th scope="row">{title}</th><td class="backend">{escape(backend)}</td>{cells}</tr>')
    return (
        '<div class="scroll"><table class="short"><thead><tr><th scope="col">Scenario</th>'
        f'<th scope="col" class="backend">Backend</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _ratio_cell(one: Headline | None) -> str:
    if one is None:
        return '<td class="none">not measured</td>'
    kind = "less" if one.time < 1 else "more"
    ours = one.ours.removeprefix("shardrt ").rpartition(", ")[0]
    more = ' class="more"' if one.memory is not None and one.memory > 1 + LEAST_MEANT else ""
    memory = "" if one.memory is None else f"<span{more}>memory {ratio(one.memory)}</span>, "
    return (
        f'<td class="{kind}"><b>{ratio(one.time)}</b>{draw_ratio(one.time)}'
        f"<small>{memory}{escape(ours.rpartition(', ')[2])}</small></td>"
    )


def _absent_scenarios(document: Document) -> str:
    lines = [
        f"<li{_class(one)}><b>{escape(one['title'])}</b> {escape(one['state'])}: {escape(one['reason'])}</li>"
        for one in document["scenarios"]
        if one["state"] != "measured"
    ]
    return f'<ul class="absent">{"".join(lines)}</ul>' if lines else ""


def _class(scenario: Document) -> str:
    return ' class="bad"' if scenario["state"] == "failed" else ""


def _scenario(scenario: Document) -> str:
    name = _id(scenario)
    head = f'<h2 id="{name}">{escape(scenario["title"])}</h2><p class="about">{escape(scenario["about"])}</p>'
    body = "".join(_measured_body(scenario)) if scenario["state"] == "measured" else _reason(scenario)
    return f'<section aria-labelledby="{name}">{head}{body}</section>'


def _reason(scenario: Document) -> str:
    told = f"<b>{escape(scenario['state'].capitalize())}.</b> {escape(scenario['reason'])}"
    return f'<ul class="absent"><li{_class(scenario)}>{told}</li></ul>'


def _measured_body(scenario: Document) -> Iterator[str]:
    yield f'<p class="setting">{escape(setting(scenario))}.</p>'
    yield (
        '<ul class="legend" aria-hidden="true"><li><i class="key compute"></i>compute</li>'
        '<li><i class="key exposed"></i>exposed communication</li>'
        f'<li><i class="key update"></i>optimizer step</li>{_limit_key(scenario)}</ul>'
    )
    yield f'<div class="scroll plot">{draw_scenario(scenario, _id(scenario))}</div>'
    yield f'<details open><summary>Numbers</summary><div class="scroll">{_table(scenario)}</div></details>'
    lines = [f'<li class="bad">{escape(told)}</li>' for told in complaints(scenario)]
    lines += [f"<li><b>{escape(who)}:</b> {escape(why)}</li>" for who, why in absences(scenario)]
    if lines:
        yield f'<ul class="absent">{"".join(lines)}</ul>'


def _limit_key(scenario: Document) -> str:
    if scenario["link"] == "none":
        return ""
    sharded = ", and of ZeRO-3" if any(row["level"] == "zero3" for row in scenario["contestants"]) else ""
    return f'<li><i class="key limit"></i>the wire\'s limit{sharded}</li>'


def _table(scenario: Document) -> str:
    limited = scenario["link"] != "none"
    heads = [
        *("", "ms/step", "middle half", "x DDP", "x torch ZeRO", "compute", "exposed", "step"),
        *("peak, MB", "x DDP", "state, MB", "wire, MB", *(["x wire's limit"] if limited else [])),
    ]
    rows = []
    for title, level in by_level(scenario):
        rows.append(f'<tr class="level"><th colspan="{len(heads)}" scope="rowgroup">{escape(title)}</th></tr>')
        for row in level:
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in _cells(row, limited))
            kind = ' class="ours"' if row["ours"] else ""
            rows.append(f'<tr{kind}><th scope="row">{escape(row["label"])}</th>{cells}</tr>')
    head = "".join(f'<th scope="col">{head}</th>' if head else "<td></td>" for head in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cells(row: Document, limited: bool) -> list[str]:
    low, high = row["ms_per_step_quartiles"]
    cells = [
        milliseconds(row["ms_per_step"]),
        f"{milliseconds(low)} - {milliseconds(high)}",
        ratio(row["times_ddp_adamw"]),
        ratio(row["times_torch_zero"]),
        milliseconds(row["compute_ms"]),
        milliseconds(row["exposed_ms"]),
        milliseconds(row["update_ms"]),
        megabytes(row["peak_bytes"]),
        ratio(row["times_ddp_adamw_memory"]),
        megabytes(row["optimizer_bytes"]),
        megabytes(row["wire_bytes_per_step"]),
    ]
    return [*cells, ratio(row["times_wire_limit"])] if limited else cells


def _id(scenario: Document) -> str:
    return "s-" + _UNSAFE_IN_IDS.sub("-", str(scenario["name"]).lower())


def _part(name: str) -> str:
    return files("shardrt.bench").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode()}'"

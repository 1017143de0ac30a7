"""A document of ``shardrt bench all`` as Markdown: the tables that docs/benchmarks.md shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shardrt.bench.telling import (
    Document,
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


def render_markdown(document: Document) -> str:
    """All tables, under headings of the third level.

    Example:
        >>> from shardrt.bench.markdown import render_markdown
        >>> document = dict.fromkeys(("machine", "system", "python", "shardrt", "torch", "deepspeed", "date"), "1")
        >>> document |= {"command": "shardrt bench all", "backends": [], "backends_missing": {}, "seconds": 1.0}
        >>> print(render_markdown(document | {"rounds": 2, "steps": 2, "scenarios": []}).splitlines()[0])
        `shardrt bench all`
    """
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Document) -> Iterator[str]:
    yield f"`{_cell(document['command'])}`"
    yield ""
    yield "; ".join(f"{name}: {_cell(value)}" for name, value in facts(document)) + "."
    yield ""
    rows = [
        (one.title, one.ours, one.rival, ratio(one.time), ratio(one.memory))
        for scenario in measured(document)
        for one in headlines(scenario)
    ]
    if rows:
        yield from _table(("scenario", "ours, the fastest of its kind", "beside", "time", "memory"), rows)
    for scenario in document["scenarios"]:
        yield from _scenario(scenario)


def _scenario(scenario: Document) -> Iterator[str]:
    yield f"### {_cell(scenario['title'])}"
    yield ""
    if scenario["state"] != "measured":
        yield f"{scenario['state'].capitalize()}: {_cell(scenario['reason'])}"
        yield ""
        return
    yield f"{_cell(scenario['about'])} {setting(scenario)}."
    yield ""
    limited = scenario["link"] != "none"
    heads = ("", "ms/step", "middle half", "x DDP", "x ZeRO", "compute", "exposed", "step", "peak, MB", "wire, MB")
    rows = [_row(row, limited) for _, rows in by_level(scenario) for row in rows]
    yield from _table((*heads, "x wire's limit") if limited else heads, rows)
    for who, why in absences(scenario):
        yield f"- {_cell(who)}: {_cell(why)}"
    yield from (f"- **{_cell(told)}**" for told in complaints(scenario))
    yield ""


def _row(row: Document, limited: bool) -> list[str]:
    low, high = row["ms_per_step_quartiles"]
    cells = [
        f"**{row['label']}**" if row["ours"] else str(row["label"]),
        milliseconds(row["ms_per_step"]),
        f"{milliseconds(low)} - {milliseconds(high)}",
        ratio(row["times_ddp_adamw"]),
        ratio(row["times_torch_zero"]),
        milliseconds(row["compute_ms"]),
        milliseconds(row["exposed_ms"]),
        milliseconds(row["update_ms"]),
        megabytes(row["peak_bytes"]),
        megabytes(row["wire_bytes_per_step"]),
    ]
    return [*cells, ratio(row["times_wire_limit"])] if limited else cells


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"
    yield ""


def _cell(text: object) -> str:
    """On one line, and no end of a cell."""
    return " ".join(str(text).split()).replace("|", "\\|")

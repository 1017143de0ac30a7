"""``shardrt trace``: how much of the communication a run hid, as a table and as a page."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardrt.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from shardrt.timeline.analysis import Figures, RankAnalysis

PAGE = "timeline.html"


class StepRange(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in newer clicks only
    """``A:B``, ``A:``, ``:B`` or ``A``: steps counted from 1, the last included."""

    name = "A:B"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Two numbers, of which either may be None."""
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d{0,9})(:?)(\d{0,9})", value)
        if found is None or value in ("", ":"):
            self.fail(f"{value!r} is no range of steps; give one like 2:10, 5: or 7", param, ctx)
        first, colon, last = found.groups()
        if "0" in (first, last):
            self.fail(f"{value!r}: steps are counted from 1", param, ctx)
        begin = int(first) if first else None
        return begin, (int(last) if last else None) if colon else begin


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--steps", type=StepRange(), default=None, help="Look at these steps; by default at all but the first.")
@click.option("--runtime", type=click.IntRange(min=1), default=None, help="Which runtime of the process, from 1.")
@click.option("--html", type=click.Path(dir_okay=False), default=None, help=f"Write the page here, not to {PAGE}.")
@click.option("--no-html", is_flag=True, help="Write no page.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def trace(
    paths: tuple[str, ...],
    steps: tuple[int | None, int | None] | None,
    runtime: int | None,
    html: str | None,
    no_html: bool,
    as_json: bool,
) -> None:
    """Tell how much communication was hidden, and draw what each rank did when.

    PATH is a timeline-rank*.json, several, or a directory of them, as recorded with Runtime(timeline=...) or
    SHARDRT_TIMELINE. The page, timeline.html, is written next to the first of them.
    """
    from shardrt.timeline.analysis import analyse, chosen_steps, notes_on
    from shardrt.timeline.reading import read_timelines

    if html is not None and no_html:
        raise ConfigError("--html and --no-html exclude each other; give one of them")
    found = read_timelines(paths)
    runtimes = sorted({one.runtime for one in found})
    chosen = runtimes[0] if runtime is None else runtime
    if chosen not in runtimes:
        raise ConfigError(f"runtime {chosen} was not recorded here; there are: {', '.join(map(str, runtimes))}")
    analyses = [analyse(one) for one in found if one.runtime == chosen]
    first, last = chosen_steps(analyses, steps)
    notes = notes_on(analyses)
    if runtime is None and len(runtimes) > 1:
        notes.append(f"{len(runtimes)} runtimes were recorded; this is runtime {chosen}. Choose with --runtime.")
    page = None if no_html else _write_page(html, paths[0], analyses, (first, last), notes)
    if as_json:
        click.echo(json.dumps(_document(analyses, first, last, notes, page), indent=2))
    else:
        _show(analyses, first, last, notes, page)


def _write_page(
    given: str | None,
    first_input: str,
    analyses: Sequence[RankAnalysis],
    steps: tuple[int, int],
    notes: Sequence[str],
) -> Path:
    from shardrt.timeline.page import render_page

    beside = Path(first_input) if Path(first_input).is_dir() else Path(first_input).parent
    page = beside / PAGE if given is None else Path(given)
    try:
        page.write_text(render_page(analyses, steps=steps, notes=notes), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the page cannot be written to {str(page)!r}: {error}; choose with --html FILE, or --no-html"
        ) from error
    return page


def _overall(analyses: Sequence[RankAnalysis], first: int, last: int) -> Figures:
    from shardrt.timeline.analysis import total

    return total(one.over(first, last) for one in analyses)


def _document(
    analyses: Sequence[RankAnalysis], first: int, last: int, notes: Sequence[str], page: Path | None
) -> dict[str, Any]:
    return {
        "runtime": analyses[0].timeline.runtime,
        "world_size": analyses[0].timeline.world_size,
        "about": dict(analyses[0].timeline.about),
        "steps": [first, last],
        "overall": {**_overall(analyses, first, last).to_json(), "steps": last - first + 1},
        "ranks": [
            {
                "rank": one.rank,
                "host": one.timeline.host,
                "spans": len(one.timeline.spans),
                "spans_dropped": one.timeline.dropped,
                **one.over(first, last).to_json(),
                "first_step": one.over(1, 1).to_json() if one.has_steps else None,
            }
            for one in analyses
        ],
        "notes": list(notes),
        "page": None if page is None else str(page),
    }


def _show(analyses: Sequence[RankAnalysis], first: int, last: int, notes: Sequence[str], page: Path | None) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    overall = _overall(analyses, first, last)
    console.print(Text(headline(overall, analyses[0].timeline.about)), soft_wrap=True)
    table = _table()
    if first > 1:
        for one in analyses:
            table.add_row(f"{one.rank}, first", *_cells(one.over(1, 1)), style="dim")
        table.add_section()
    for one in analyses:
        table.add_row(str(one.rank), *_cells(one.over(first, last)))
    if len(analyses) > 1:
        table.add_section()
        table.add_row("all", str(last - first + 1), *_cells(overall)[1:], style="bold")
    console.print(table)
    console.print(
        "Milliseconds per step. Hidden: the share of communication during which the trainer did not wait for it.",
        soft_wrap=True,
        highlight=False,
    )
    for note in notes:
        console.print(Text(f"Note: {note}"), soft_wrap=True)
    if page is not None:
        console.print(Text(f"The lanes are drawn in {page}"), soft_wrap=True)


def headline(figures: Figures, about: Any) -> str:
    """One sentence: what ran, and how much was hidden."""
    names = {key: value["name"] for key, value in about.items() if isinstance(value, dict) and "name" in value}
    run = ", ".join(f"{key} {names[key]}" for key in ("schedule", "backend", "partitioner") if key in names)
    hidden = (
        "no communication was recorded" if figures.hidden is None else f"{figures.hidden:.1%} of communication hidden"
    )
    return f"{run}: {hidden}" if run else hidden


def _table() -> Table:
    from rich.table import Table

    table = Table(pad_edge=False)
    table.add_column("rank", no_wrap=True)
    for heading in ("steps", "ms", "comm.", "reduce", "gather", "waited", "exposed", "hidden"):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _cells(figures: Figures) -> list[str]:
    each = max(figures.steps, 1)
    times = ("duration", "communication", "reduce", "gather", "waited", "exposed")
    hidden = "" if figures.hidden is None else f"{figures.hidden:.1%}"
    return [str(figures.steps), *(_ms(getattr(figures, name) / each / 1e3) for name in times), hidden]


def _ms(value: float) -> str:
    """Three figures or so: wide tables are cut in terminals of 80 columns."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"

"""``shardrt doctor --hang``: what the ranks' reports of a failed wait tell together, for people."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from shardrt.flight.explaining import Explanation, RankView
    from shardrt.flight.report import HangReport

_MOST_ROWS = 64


def explain_directory(directory: str, *, as_json: bool) -> None:
    """Read the reports and print what they tell."""
    from shardrt.flight.explaining import explain_reports
    from shardrt.flight.reading import read_reports

    reports, notes = read_reports(directory)
    found = explain_reports(reports)
    if as_json:
        document = found.to_json() | {"notes": [*notes, *found.notes], "about": dict(reports[0].about)}
        click.echo(json.dumps(document, indent=2))
    else:
        _show(found, reports, [*notes, *found.notes])


def _show(found: Explanation, reports: list[HangReport], notes: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(headline(found, reports)), soft_wrap=True)
    table = Table(pad_edge=False)
    table.add_column("rank", no_wrap=True)
    for heading in ("report", "last heard", "did last", "waited at"):
        table.add_column(heading, overflow="fold")
    for view in _rows(found):
        style = "red" if view.rank in found.guilty else None
        # Text and not str: square brackets in somebody's words are no markup.
        table.add_row(*(Text(cell) for cell in (str(view.rank), *_cells(view))), style=style)
    console.print(table)
    if len(found.ranks) > _MOST_ROWS:
        console.print(Text(f"{len(found.ranks) - _MOST_ROWS} more ranks reported and seem well"), soft_wrap=True)
    if found.parting is not None:
        console.print(Text(found.parting.describe()), soft_wrap=True)
    console.print(Text(f"Likely cause ({found.cause}): {found.text}", style="bold"), soft_wrap=True)
    console.print(Text(f"What to do: {found.advice}"), soft_wrap=True)
    for report in reports:
        console.print(
            Text(f"rank {report.rank} said: {report.error_type}: {report.error}", style="dim"), soft_wrap=True
        )
    for note in notes:
        console.print(Text(f"Note: {note}", style="yellow"), soft_wrap=True)


def headline(found: Explanation, reports: list[HangReport]) -> str:
    """One sentence: how many ranks there were, which of them reported, and what ran.

    Example:
        >>> from shardrt.cli.hang import headline
        >>> from types import SimpleNamespace as N
        >>> views = [N(rank=0, reported=True), N(rank=1, reported=False)]
        >>> headline(N(world_size=2, ranks=views), [N(about={"backend": {"name": "gloo"}, "timeout": 3.0})])
        '2 ranks (backend gloo, timeout 3 s): rank 0 reported, rank 1 did not'
    """
    about = reports[0].about
    names = [f"{key} {_name(about[key])}" for key in ("backend", "schedule") if key in about]
    if isinstance(about.get("timeout"), (int, float)):
        names.append(f"timeout {about['timeout']:g} s")
    run = f" ({', '.join(names)})" if names else ""
    silent = [view.rank for view in found.ranks if not view.reported]
    told = f"{_ranks([view.rank for view in found.ranks if view.reported])} reported"
    return f"{found.world_size} ranks{run}: {told}" + (f", {_ranks(silent)} did not" if silent else "")


def _rows(found: Explanation) -> list[RankView]:
    """All ranks, or in a large world those that matter: guilty ones and those without a report first."""
    ordered = sorted(found.ranks, key=lambda view: (view.rank not in found.guilty, view.reported, view.rank))
    return sorted(ordered[:_MOST_ROWS], key=lambda view: view.rank)


def _cells(view: RankView) -> tuple[str, str, str, str]:
    if view.reported:
        heard = "itself"
    elif view.heard is None:
        heard = "never"
    else:
        heard = f"{view.heard:.1f} s before" + (f", {view.process}" if view.process and view.silent else "")
    waited = view.waited or "-"
    if view.where:
        waited += f"; at {view.where}"
    return "yes" if view.reported else "no", heard, view.last, waited


def _name(value: Any) -> str:
    return str(value.get("name")) if isinstance(value, dict) else str(value)


def _ranks(numbers: list[int]) -> str:
    if len(numbers) > _MOST_ROWS:
        return f"{len(numbers)} ranks"
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))

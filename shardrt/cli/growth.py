"""``shardrt bench growth``: how cost grows with parameters, ranks and buckets."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from shardrt.bench.growth import AXES
from shardrt.cli.contest import number_or_blank
from shardrt.cli.progress import rank_progress

if TYPE_CHECKING:
    from rich.table import Table

    from shardrt.bench.growth import GrowthReport


_WIDTH = 150
"""Of what is written to a file."""


def _sizes(name: str, what: str) -> str:
    return f"{what}, and other sizes that are given likewise; several --{name}, growing."


@click.command()
@click.option(
    "--axis", "axes", multiple=True, type=click.Choice(["parameters", "ranks", "buckets"]), help="Only these."
)
@click.option("--params", multiple=True, type=click.IntRange(min=1), help=_sizes("params", "So many parameters"))
@click.option("--ranks", multiple=True, type=click.IntRange(min=1), help=_sizes("ranks", "So many processes"))
@click.option("--buckets", multiple=True, type=click.IntRange(min=1), help=_sizes("buckets", "So many buckets"))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Rounds to take the best of.")
@click.option(
    "--trained-params",
    default=10_000,
    show_default=True,
    type=click.IntRange(min=1),
    help="More parameters than these are only planned for.",
)
@click.option(
    "--patience", default=600.0, show_default=True, type=click.FloatRange(min=1), help="Seconds without news."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@click.pass_context
def growth(
    ctx: click.Context,
    axes: tuple[str, ...],
    params: tuple[int, ...],
    ranks: tuple[int, ...],
    buckets: tuple[int, ...],
    rounds: int,
    trained_params: int,
    patience: float,
    as_json: bool,
) -> None:
    """Measure how cost grows with parameters, ranks and buckets; nothing should be worse than n log n.

    By default up to 100,000 parameters, 64 ranks (real processes, some 200 MB each) and 1,000 buckets. Exits with 1 if
    something grows faster than n log n that need not.
    """
    from shardrt.bench.growth import GrowthSettings, measure_growth

    given = {"params": params, "ranks": ranks, "buckets": buckets}
    settings = GrowthSettings(
        axes=axes or AXES,
        rounds=rounds,
        trained_params=trained_params,
        **{name: sizes for name, sizes in given.items() if sizes},
    )
    with rank_progress(
        ranks=max(case.ranks for case in settings.cases),
        steps=settings.turns,
        read=lambda event: (event["case"], event["done"], ""),
        quiet=as_json,
    ) as on_event:
        report = measure_growth(settings, on_event=on_event, patience=patience)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        show_growth(report)
    ctx.exit(0 if report.all_within else 1)


def show_growth(report: GrowthReport) -> None:
    """Print a table for each axis, and what the columns mean."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for axis in report.settings.axes:
        console.print(_table(report, axis))
    for sentence in (
        "exponent: slope on a log-log plot over the upper sizes; n log n: that of n log n over the same sizes.",
        "ms are of the slowest rank, the best of the rounds. Along ranks a cost is judged by the processor time of the "
        "busiest rank (cpu), since all ranks share this machine: the clock shows the work of all of them together.",
        "torch's process group is no work of ours, and is not judged.",
    ):
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)


def _table(report: GrowthReport, axis: str) -> Table:
    from rich.table import Table

    sizes = report.settings.sizes(axis)
    table = Table(title=f"growth with {axis}", title_justify="left")
    table.add_column("")
    table.add_column("", no_wrap=True)
    for heading in (*(f"{size:,}" for size in sizes), "exponent", "n log n"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("at most n log n")
    for curve in report.curves:
        if curve.axis != axis:
            continue
        counted = curve.judged_by == "counted"
        rows = {"": curve.seconds} if counted else {"ms": curve.seconds}
        if axis == "ranks" and curve.cpu is not None:
            rows["cpu ms"] = curve.cpu
        for unit, values in rows.items():
            judged = unit == "cpu ms" or len(rows) == 1
            by_size = dict(zip(curve.sizes, values, strict=True))
            exponent = curve.exponent if judged else curve.clock_exponent
            table.add_row(
                curve.what if unit != "cpu ms" else "",
                unit,
                *("" if size not in by_size else _number(by_size[size], counted) for size in sizes),
                number_or_blank(exponent, ".2f"),
                number_or_blank(curve.bound, ".2f") if judged else "",
                curve.verdict if judged else "",
            )
    return table


def _number(value: float, counted: bool) -> str:
    return f"{value:,.0f}" if counted else f"{value * 1e3:,.1f}"

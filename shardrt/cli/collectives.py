"""``shardrt bench collectives``: what moving bytes costs with each backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from shardrt.cli.contest import number_or_blank
from shardrt.cli.progress import rank_progress

if TYPE_CHECKING:
    from rich.table import Table

    from shardrt.bench.collectives import CollectiveResult, CollectivesReport


@click.command()
@click.option(
    "--ranks",
    multiple=True,
    type=click.IntRange(min=2),
    help="Processes, and other numbers of them that are given likewise; default: 2 and 4, with a link 2.",
)
@click.option(
    "--mb",
    "megabytes",
    multiple=True,
    type=click.FloatRange(min=0.001, max=10_000),
    help="Megabytes of the buffer, and other sizes that are given likewise; default: 1, 25 and 100.",
)
@click.option(
    "--operation",
    "operations",
    multiple=True,
    metavar="NAME",
    help="Only this one, and others that are named likewise: reduce_scatter, all_gather, all_reduce, broadcast.",
)
@click.option(
    "--backend",
    "backends",
    multiple=True,
    metavar="NAME",
    help="Only this one, and others that are named likewise; default: all that are available.",
)
@click.option(
    "--link",
    default="none",
    show_default=True,
    metavar="RATE",
    help="Two hosts with this rate between them, such as 1gbit (needs root and iproute2); none: loopback.",
)
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Rounds to take medians of.")
@click.option(
    "--patience", default=120.0, show_default=True, type=click.FloatRange(min=1), help="Seconds without news."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@click.pass_context
def collectives(
    ctx: click.Context,
    /,
    ranks: tuple[int, ...],
    megabytes: tuple[float, ...],
    operations: tuple[str, ...],
    patience: float,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Time every backend's collectives beside torch's over Gloo and a plain copy.

    Runs on the CPU, one thread per rank, in float32. Exits with 1 if a rank fails or if somebody gets wrong numbers.
    """
    from shardrt.bench.collectives import CROSSING, CollectivesSettings, measure_collectives
    from shardrt.bench.overlap import NO_LINK

    settings = CollectivesSettings(
        ranks=ranks or ((2, 4) if arguments["link"] == NO_LINK else (2,)),
        megabytes=megabytes or (1.0, 25.0, 100.0),
        operations=operations or tuple(CROSSING),
        **arguments,
    )
    with rank_progress(
        ranks=max(settings.ranks),
        steps=settings.all_runs,
        read=lambda event: (event["doing"], event["done"], ""),
        quiet=as_json,
    ) as on_event:
        report = measure_collectives(settings, on_event=on_event, patience=patience)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        show_collectives(report)
    ctx.exit(0 if report.all_right else 1)


def show_collectives(report: CollectivesReport) -> None:
    """Print a table for each number of ranks and operation, and what they mean."""
    from rich.console import Console

    from shardrt.bench.overlap import NO_LINK

    settings = report.settings
    console = Console()
    linked = settings.link != NO_LINK
    where = f"on an emulated link of {settings.link}" if linked else "on loopback"
    console.print(f"collectives {where}, float32, {settings.rounds} rounds", soft_wrap=True, highlight=False)
    for ranks in settings.ranks:
        for operation in settings.operations:
            console.print(_table(report, ranks, operation, linked))
    for sentence in (*_about(linked), *_absences(report), *_complaints(report)):
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)


def _table(report: CollectivesReport, ranks: int, operation: str, linked: bool) -> Table:
    from rich.table import Table

    table = Table(title=f"{operation}, {ranks} ranks", title_justify="left")
    table.add_column("MB", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in ("ms", "middle half", "x torch", "x copy", *(["x wire"] if linked else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for size in report.settings.megabytes:
        table.add_section()
        shown = f"{size:g}"
        wire = report.wire_seconds(operation, size, ranks)
        if wire is not None:
            table.add_row(shown, "the wire's limit", _milliseconds(wire), "", "", "", "1.000")
            shown = ""
        for result in report.results:
            if result.case == (ranks, operation, size):
                table.add_row(shown, *_cells(report, result), *(_wire_cell(report, result) if linked else ()))
                shown = ""
    return table


def _cells(report: CollectivesReport, result: CollectiveResult) -> Iterator[str]:
    from shardrt.bench.collectives import COPY, TORCH

    low, high = result.quartiles
    yield result.label
    yield _milliseconds(result.seconds)
    yield f"{_milliseconds(low)}-{_milliseconds(high)}"
    yield f"{report.beside(result, TORCH):.3f}"
    yield f"{report.beside(result, COPY):.2f}"


def _wire_cell(report: CollectivesReport, result: CollectiveResult) -> Iterator[str]:
    yield number_or_blank(report.times_wire(result), ".3f")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.{2 if seconds < 0.01 else 1 if seconds < 0.1 else 0}f}"


def _about(linked: bool) -> Iterator[str]:
    yield (
        "Time: of one operation on the slowest rank, medians of the rounds; x torch and x copy: medians of the rounds' "
        "ratios, below 1 is faster. MB: the whole buffer, in millions of bytes; the copy is of as many on each rank."
    )
    if linked:
        yield (
            "The wire's limit: what must cross between the hosts, at the link's rate, both ways at once: half of the "
            "buffer for reduce_scatter and all_gather, all of it for all_reduce and broadcast."
        )


def _absences(report: CollectivesReport) -> Iterator[str]:
    told: dict[tuple[str, str], list[int]] = {}
    for ranks, reasons in report.missing.items():
        for name, reason in reasons.items():
            told.setdefault((name, reason), []).append(ranks)
    for (name, reason), counts in told.items():
        everywhere = len(counts) == len(report.settings.ranks)
        yield f"Not measured{'' if everywhere else f' with {counts[0]} ranks'}: {name}: {reason}."


def _complaints(report: CollectivesReport) -> Iterator[str]:
    for result in report.results:
        if not result.is_right:
            yield (
                f"WRONG NUMBERS: {result.label}, {result.operation} of {result.megabytes:g} MB on {result.ranks} "
                "ranks. This must never happen, please report it."
            )

"""``shardrt bench``: measurements to run on the machine at hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table

    from shardrt.bench.peers import PeersReport, PeersSettings
    from shardrt.bench.planning import PlanningReport
    from shardrt.bench.step import StepReport
    from shardrt.launch import OnEvent


@click.group()
def bench() -> None:
    """Time planning and steps here, and compare."""


@bench.command()
@click.option("--params", default=20_000, show_default=True, type=click.IntRange(min=1), help="Parameters to plan for.")
@click.option("--ranks", default=1024, show_default=True, type=click.IntRange(min=1), help="Ranks to plan for.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Rounds to take medians of.")
@click.option("--growth/--no-growth", default=True, help="Also plan for 10,000 and for 100,000 parameters.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def planning(params: int, ranks: int, rounds: int, growth: bool, as_json: bool) -> None:
    """Time every installed partitioner beside torch's ZeroRedundancyOptimizer."""
    from shardrt.bench.planning import measure_planning

    report = measure_planning(params=params, ranks=ranks, rounds=rounds, growth=growth)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        _show_planning(report)


@bench.command()
@click.option("--rounds", default=30, show_default=True, type=click.IntRange(min=1), help="Rounds to take medians of.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def step(rounds: int, as_json: bool) -> None:
    """Time a step on one rank, through shardrt and with the bare optimizer."""
    from shardrt.bench.step import measure_steps

    report = measure_steps(rounds=rounds)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        _show_steps(report)


@bench.command()
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(min=2), help="Processes to train with.")
@click.option("--steps", default=20, show_default=True, type=click.IntRange(min=1), help="Timed steps per round.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Rounds to take medians of.")
@click.option(
    "--size",
    default="small",
    show_default=True,
    type=click.Choice(["small", "40m"]),
    help="1 or 40 million parameters.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@click.pass_context
def peers(ctx: click.Context, /, as_json: bool, **arguments: Any) -> None:
    """Train with ZeRO-1 through shardrt, with DDP and with torch's ZeRO, and compare.

    Runs on the CPU over Gloo on loopback, one thread per rank. DeepSpeed and FSDP are not measured here. Exits with 1
    if a rank fails or if ranks end with different parameters.
    """
    from shardrt.bench.peers import PeersSettings, measure_peers

    settings = PeersSettings(**arguments)
    with _peers_progress(settings, quiet=as_json) as on_event:
        report = measure_peers(settings, on_event=on_event)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        _show_peers(report)
    ctx.exit(0 if report.ranks_agree else 1)


@contextmanager
def _peers_progress(settings: PeersSettings, *, quiet: bool) -> Iterator[OnEvent]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from shardrt.bench.peers import CONTESTANTS

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True) as bar:
        task = bar.add_task(f"starting {settings.ranks} ranks", total=settings.all_steps)

        def on_event(rank: int, event: Any) -> None:
            if rank == 0:
                bar.update(task, description=CONTESTANTS[event["contestant"]], completed=event["done"])

        yield on_event


def _show_planning(report: PlanningReport) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from shardrt.bench.planning import GROWTH, TORCH

    table = Table(title=f"planning {report.params:,} parameters for {report.ranks:,} ranks", title_justify="left")
    table.add_column("partitioner", no_wrap=True)
    for heading in ("ms", "times faster than torch", "imbalance", f"growth, {GROWTH[0]:,} to {GROWTH[1]:,}"):
        table.add_column(heading, justify="right")
    for row in report.times:
        table.add_row(
            Text(row.name),
            f"{row.seconds * 1e3:.1f}",
            _number(report.speedup(row), ".1f"),
            _number(row.imbalance, ".3f"),
            _number(row.growth, ".1f"),
        )
    if report.torch_seconds is not None:
        table.add_row(Text(TORCH), f"{report.torch_seconds * 1e3:.1f}", "1.0", "", "")
    Console().print(table)


def _show_steps(report: StepReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"a step on one rank, one thread, medians of {report.rounds} rounds", title_justify="left")
    for heading in ("model", "optimizer"):
        table.add_column(heading)
    for heading in ("parameters", "bare, ms", "shardrt, ms", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.times:
        table.add_row(
            row.model,
            row.optimizer,
            f"{row.params:,}",
            f"{row.bare_seconds * 1e3:.3f}",
            f"{row.shardrt_seconds * 1e3:.3f}",
            f"{row.ratio:.3f}",
        )
    Console().print(table)


def _show_peers(report: PeersReport) -> None:
    from rich.console import Console

    from shardrt.bench.peers import DDP, TORCH_ZERO

    settings = report.settings
    console = Console()
    console.print(
        f"{report.parameters:,} parameters, AdamW, {settings.ranks} ranks over Gloo on loopback, "
        f"{settings.rounds} rounds of {settings.steps} steps",
        soft_wrap=True,
        highlight=False,
    )
    # Two tables: one would be wider than a terminal's 80 columns, and rich would cut its numbers.
    times, costs = (
        _peers_table("ms/step", "middle half", "fastest", "x DDP", "x ZeRO"),
        _peers_table("state, MB", "wire, MB", "x least", "differs by"),
    )
    for result in report.results:
        low, high = result.quartiles
        wire = result.least_wire_bytes
        times.add_row(
            result.label,
            f"{result.seconds * 1e3:.1f}",
            f"{low * 1e3:.0f}-{high * 1e3:.0f}",
            f"{result.fastest * 1e3:.1f}",
            f"{result.times(report[DDP]):.3f}",
            f"{result.times(report[TORCH_ZERO]):.3f}",
        )
        costs.add_row(
            result.label,
            f"{result.optimizer_bytes / 1e6:.1f}",
            _number(None if wire is None else wire / 1e6, ".2f"),
            _number(None if wire is None else wire / report.minimum_wire_bytes, ".3f"),
            f"{result.largest_difference:.3g}",
        )
    console.print(times)
    console.print(costs)
    for sentence in _about_peers(report):
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)


def _peers_table(*headings: str) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _about_peers(report: PeersReport) -> Iterator[str]:
    from shardrt.bench.peers import NOT_MEASURED

    yield "Time: medians of the slowest rank's steps; x DDP and x ZeRO (torch's): medians of the rounds' ratios."
    yield "State: the optimizer's, on the fullest rank. Differs: the largest difference from DDP + AdamW's parameters."
    yield (
        "Wire: per step and rank, in the quietest round, as the loopback device counts (TCP's overhead and other "
        "programs' traffic included); the least is 2 (N - 1) / N of the model, "
        f"here {report.minimum_wire_bytes / 1e6:.2f} MB."
    )
    yield f"Not measured here: {', '.join(NOT_MEASURED)}."
    if not report.ranks_agree:
        broken = ", ".join(result.label for result in report.results if not result.ranks_agree)
        yield f"The ranks ended with different parameters under: {broken}. This must never happen, please report it."


def _number(value: float | None, style: str) -> str:
    return "" if value is None else format(value, style)

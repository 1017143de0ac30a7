"""``shardrt bench``: measurements to run on the machine at hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from shardrt.cli.collectives import collectives
from shardrt.cli.contest import contest_options, contest_progress, number_or_blank, show_contest
from shardrt.cli.full import full
from shardrt.cli.growth import growth
from shardrt.cli.link import link
from shardrt.cli.overlap import overlap
from shardrt.cli.shard import shard
from shardrt.cli.simulate import simulate
from shardrt.cli.state import state
from shardrt.cli.strategies import strategies

if TYPE_CHECKING:
    from shardrt.bench.peers import PeersReport
    from shardrt.bench.planning import PlanningReport
    from shardrt.bench.step import StepReport


@click.group()
def bench() -> None:
    """Time planning and steps here, and compare."""


bench.add_command(growth)
bench.add_command(full)
bench.add_command(collectives)
bench.add_command(link)
bench.add_command(overlap)
bench.add_command(shard)
bench.add_command(simulate)
bench.add_command(state)
bench.add_command(strategies)


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
@contest_options(steps=20)
@click.pass_context
def peers(ctx: click.Context, /, as_json: bool, **arguments: Any) -> None:
    """Train with ZeRO-1 through shardrt, with DDP and with torch's ZeRO, and compare.

    Runs on the CPU over Gloo on loopback, one thread per rank. DeepSpeed and FSDP are not measured here. Exits with 1
    if a rank fails or if ranks end with different parameters.
    """
    from shardrt.bench.peers import PeersSettings, measure_peers

    settings = PeersSettings(**arguments)
    with contest_progress(settings, quiet=as_json) as on_event:
        report = measure_peers(settings, on_event=on_event)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        _show_peers(report)
    ctx.exit(0 if report.ranks_agree else 1)


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
            number_or_blank(report.speedup(row), ".1f"),
            number_or_blank(row.imbalance, ".3f"),
            number_or_blank(row.growth, ".1f"),
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
    from shardrt.bench.peers import NOT_MEASURED

    show_contest(report, where="on loopback", sentences=[f"Not measured here: {', '.join(NOT_MEASURED)}."])

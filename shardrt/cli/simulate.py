"""``shardrt bench simulate``: a step on thousands of ranks, from collectives measured here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from shardrt.cli.progress import rank_progress

if TYPE_CHECKING:
    from rich.table import Table

    from shardrt.bench.simulate import Measured, SimulateReport


_WIDTH = 110
"""Of what is written to a file."""


@click.command()
@click.option(
    "--ranks", multiple=True, type=click.IntRange(min=2), help="Ranks to simulate, several times for several."
)
@click.option(
    "--world", "worlds", multiple=True, type=click.IntRange(min=2), help="Real ranks to measure on, likewise."
)
@click.option("--size", default="40m", show_default=True, type=click.Choice(["small", "40m"]), help="Of the model.")
@click.option("--bucket-mb", type=float, help="Buckets of all schedules but sync; by default as fits the size.")
@click.option(
    "--straggle", default=0.02, show_default=True, type=float, help="Mean delay of ranks, of their computing."
)
@click.option("--seed", default=0, show_default=True, type=int, help="Of the delays.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1), help="To take medians of.")
@click.option("--backend", default="gloo", show_default=True, help="Whose collectives are measured.")
@click.option(
    "--fitted",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The document (--json) of an earlier run, to be used instead of measuring.",
)
@click.option("--latency-us", type=click.FloatRange(min=0), help="Of a message, instead of the one measured.")
@click.option("--gbit", type=click.FloatRange(min=0, min_open=True), help="The rate of a rank's wire, likewise.")
@click.option(
    "--patience", default=300.0, show_default=True, type=click.FloatRange(min=1), help="Seconds without news."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@click.pass_context
def simulate(
    ctx: click.Context,
    /,
    ranks: tuple[int, ...],
    worlds: tuple[int, ...],
    fitted: Path | None,
    latency_us: float | None,
    gbit: float | None,
    patience: float,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Simulate a training step on 1,000 and 10,000 ranks, beside the formulas it should follow.

    Measures collectives on 2, 4 and 8 ranks of this machine, fits a cost model to them, and simulates every schedule
    and full sharding with four algorithms. Exits with 1 if a simulated step does not follow its formula.
    """
    from shardrt.bench.simulate import Measured, SimulateSettings, measure_simulation

    given: dict[str, Any] = {"ranks": ranks, "worlds": worlds}
    settings = SimulateSettings(**arguments, **{name: value for name, value in given.items() if value})
    measured = None if fitted is None else _with_wire(Measured.read(fitted), latency_us, gbit)
    if measured is None and (latency_us is not None or gbit is not None):
        raise click.UsageError("--latency-us and --gbit change a model that was fitted before: give --fitted too")
    with rank_progress(
        ranks=max(settings.worlds),
        steps=len(settings.worlds),
        read=lambda event: (event["what"], event["done"], ""),
        quiet=as_json or measured is not None,
    ) as on_event:
        report = measure_simulation(settings, measured=measured, on_event=on_event, patience=patience)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        show_simulation(report)
    ctx.exit(0 if report.follows else 1)


def _with_wire(measured: Measured, latency_us: float | None, gbit: float | None) -> Measured:
    """The same ranks on another network."""
    model = measured.model
    if latency_us is not None:
        model = attrs.evolve(model, latency=latency_us * 1e-6)
    if gbit is not None:
        model = attrs.evolve(model, per_byte=8e-9 / gbit)
    return attrs.evolve(measured, model=model)


def show_simulation(report: SimulateReport) -> None:
    """Print the model, the check against reality, and the tables."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    model = report.measured.model
    off = "" if report.measured.off is None else f"; off by {report.measured.off:.0%} (median) from what was measured"
    console.print(
        f"Cost model: {model.base * 1e6:.0f} us per collective, {model.latency * 1e6:.0f} us latency, "
        f"{model.overhead * 1e6:.1f} us per message, {1e-9 / model.per_byte if model.per_byte else 0:.2f} GB/s sent, "
        f"{1e-9 / model.reduce_per_byte if model.reduce_per_byte else 0:.2f} GB/s added up{off}",
        soft_wrap=True,
        highlight=False,
    )
    if report.checks:
        console.print(_check_table(report))
    for ranks in report.settings.ranks:
        console.print(_step_table(report, ranks))
    for sentence in (
        f"{report.model_bytes / 1e6:,.1f} MB of parameters in {report.buckets} buckets; simulating took "
        f"{report.simulating_seconds:.1f} s.",
        "sync and bucket must meet their formula; those of the others are bounds that nothing can pass. With delays "
        f"each rank is late by {report.settings.straggle:.0%} of its computing on average, and the formula waits for "
        "the slowest.",
        "direct is what shardrt's gloo does. Congestion, many senders to one receiver, and slower networks between "
        "racks are in no row.",
    ):
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)


def _check_table(report: SimulateReport) -> Table:
    from rich.table import Table

    table = Table(title="real steps beside simulated ones, ms", title_justify="left")
    table.add_column("")
    for heading in ("ranks", "measured", "simulated, overlapped", "in turn", "measured / in turn"):
        table.add_column(heading, justify="right")
    for check in report.checks:
        numbers = (check.measured, check.overlapped, check.in_turn)
        table.add_row(
            check.kind,
            str(check.ranks),
            *(f"{value * 1e3:,.1f}" for value in numbers),
            f"{check.measured / check.in_turn:.2f}",
        )
    return table


def _step_table(report: SimulateReport, ranks: int) -> Table:
    from rich.table import Table

    table = Table(title=f"a step on {ranks:,} ranks, ms", title_justify="left")
    for heading in ("algorithm", ""):
        table.add_column(heading, no_wrap=True)
    for heading in ("simulated", "formula", "ratio", "with delays", "formula", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for step in report.steps:
        if step.ranks == ranks:
            mark = "" if step.exact else ">= "
            table.add_row(
                step.algorithm,
                step.kind,
                f"{step.seconds * 1e3:,.1f}",
                f"{mark}{step.formula * 1e3:,.1f}",
                f"{step.seconds / step.formula:.3f}",
                f"{step.delayed * 1e3:,.1f}",
                f"{mark}{step.delayed_formula * 1e3:,.1f}",
                f"{step.delayed / step.delayed_formula:.3f}",
            )
    return table

"""``shardrt bench shard``: whole modules sharded by shardrt, FSDP and DeepSpeed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from shardrt.cli.contest import contest_options, contest_progress, number_or_blank

if TYPE_CHECKING:
    from rich.table import Table

    from shardrt.bench.shard import ShardReport, ShardResult


@click.command()
@contest_options(steps=5)
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="Only this contestant, others that are named likewise, and DDP + AdamW; default: all.",
)
@click.option("--schedule", default=None, help="Of rt.shard, as `shardrt plugins` lists them; default: the runtime's.")
@click.option(
    "--patience", default=300.0, show_default=True, type=click.FloatRange(min=1), help="Seconds without news."
)
@click.pass_context
def shard(ctx: click.Context, /, patience: float, as_json: bool, **arguments: Any) -> None:
    """Train with rt.shard, with FSDP and with DeepSpeed, and compare time and memory.

    Runs on the CPU over Gloo on loopback, one thread per rank. Contestants: ddp_adamw, shard_optim, shard_grad_op,
    full_shard, fsdp2_keep, fsdp2_reshard, fsdp1_shard_grad_op, fsdp1_full_shard, deepspeed_1, deepspeed_2, deepspeed_3.
    Exits with 1 if a rank fails or if somebody did not train what DDP + AdamW trains.
    """
    from shardrt.bench.shard import ShardSettings, measure_shard

    settings = ShardSettings(**arguments)
    with contest_progress(settings, quiet=as_json) as on_event:
        report = measure_shard(settings, on_event=on_event, patience=patience)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        show_shard(report)
    ctx.exit(0 if report.all_alike else 1)


def show_shard(report: ShardReport) -> None:
    """Print the tables and what they mean."""
    from rich.console import Console

    settings = report.settings
    console = Console()
    console.print(
        f"{report.parameters:,} parameters, AdamW, {settings.ranks} ranks over Gloo on loopback, {settings.rounds} "
        f"rounds of {settings.steps} steps, shardrt with schedule {report.schedule or 'none'}",
        soft_wrap=True,
        highlight=False,
    )
    costs = _table("", "ms/step", "middle half", "x DDP", "peak, MB", "x DDP")
    checks = _table("", "state, MB", "wire, MB", "differs by", "ranks", "alike")
    there = {result.name: result for result in report.results}
    for name, label in settings.asked_for.items():
        if name in there:
            costs.add_row(label, *_cost_cells(report, there[name]))
            checks.add_row(label, *_check_cells(there[name]))
        else:
            costs.add_row(label, "missing")
            checks.add_row(label, "missing")
    console.print(costs)
    console.print(checks)
    if report.comparisons:
        console.print(_comparisons(report))
    for sentence in (*_about(report), *dict.fromkeys(report.missing.values())):
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)


def _cost_cells(report: ShardReport, result: ShardResult) -> Iterator[str]:
    from shardrt.bench.contest import DDP

    low, high = result.quartiles
    reference = next(one for one in report.results if one.name == DDP)
    peak = result.least_peak_bytes
    yield f"{result.seconds * 1e3:.1f}"
    yield f"{low * 1e3:.0f}-{high * 1e3:.0f}"
    yield f"{result.times(reference):.3f}"
    yield number_or_blank(None if peak is None else peak / 1e6, ",.1f")
    yield number_or_blank(result.times_memory(reference), ".3f")


def _check_cells(result: ShardResult) -> Iterator[str]:
    wire = result.least_wire_bytes
    yield f"{result.optimizer_bytes / 1e6:.1f}"
    yield number_or_blank(None if wire is None else wire / 1e6, ".2f")
    yield f"{result.largest_difference:.3g}"
    yield "agree" if result.ranks_agree else "differ"
    yield "yes" if result.is_alike else "NO"


def _comparisons(report: ShardReport) -> Table:
    labels = report.settings.asked_for
    table = _table("shardrt", "beside", "time", "memory")
    for one in report.comparisons:
        memory = number_or_blank(one.memory, ".3f")
        table.add_row(labels[one.strategy].removeprefix("shardrt, "), labels[one.rival], f"{one.time:.3f}", memory)
    return table


def _table(*headings: str) -> Table:
    from rich.table import Table

    table = Table()
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


def _about(report: ShardReport) -> Iterator[str]:
    from shardrt.bench.shard import TOLERANCE

    yield "Time: medians of the slowest rank's steps; ratios: medians of the rounds' ratios, below 1 is faster."
    yield (
        "Peak: the system's high-water mark from before the model is made until the last timed step, above what was "
        "resident before, on the fullest rank in the best round; pages that ranks share count in equal parts. "
        "Small models drown in what the process itself needs."
    )
    yield "State: the optimizer's, on the fullest rank. Wire: per step and rank, as the network device counts."
    yield f"Differs: the largest difference from DDP + AdamW's parameters; alike: at most {TOLERANCE:g}."
    broken = ", ".join(result.label for result in report.results if not result.ranks_agree)
    if broken:
        yield f"The ranks ended with different parameters under: {broken}."

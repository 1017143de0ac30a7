"""``shardrt bench state``: what saving and consolidating optimizer state costs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardrt.cli.contest import number_or_blank
from shardrt.cli.progress import rank_progress

if TYPE_CHECKING:
    from shardrt.bench.state import StateReport, WayResult


@click.command()
@click.option("--ranks", default=4, show_default=True, type=click.IntRange(min=2), help="Processes.")
@click.option("--state-gb", default=1.0, show_default=True, type=float, help="Optimizer state over all ranks.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Rounds to take medians of.")
@click.option(
    "--dir",
    "directory",
    default=None,
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where to write, on the disk that is meant; default: here.",
)
@click.option(
    "--patience", default=600.0, show_default=True, type=click.FloatRange(min=1), help="Seconds without news."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def state(directory: Path | None, patience: float, as_json: bool, **arguments: Any) -> None:
    """Save and consolidate optimizer state through shardrt, with torch's ZeRO and with torch's checkpoints.

    Runs on the CPU over Gloo on loopback, one thread per rank, and writes about two times the state to the disk for
    each of six ways and each round. Everything written is removed.
    """
    from shardrt.bench.state import WAYS, StateSettings, measure_state

    settings = StateSettings(**arguments)
    with rank_progress(
        ranks=settings.ranks,
        steps=settings.turns,
        read=lambda event: (WAYS[event["way"]], event["done"], ""),
        quiet=as_json,
    ) as on_event:
        report = measure_state(settings, directory=directory, on_event=on_event, patience=patience)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        show_state(report)


def show_state(report: StateReport) -> None:
    """Print the tables and what they mean."""
    from rich.console import Console
    from rich.table import Table

    settings = report.settings
    console = Console()
    console.print(
        f"{report.state_bytes / 1e9:.3f} GB of AdamW state of {report.parameters:,} parameters, {settings.ranks} ranks "
        f"over Gloo on loopback, {settings.rounds} rounds, in {report.directory}",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    times = Table()
    times.add_column("", no_wrap=True)
    for heading in ("s", "MB rank", "mean", "files", "synced"):
        times.add_column(heading, justify="right", no_wrap=True)
    for result in report.results:
        times.add_row(*_cells(result))
    console.print(times)
    ratios = Table()
    ratios.add_column("", no_wrap=True)
    for heading in ("x time", "x memory"):
        ratios.add_column(heading, justify="right", no_wrap=True)
    for (pair, time), memory in zip(report.time_ratios.items(), report.memory_ratios.values(), strict=True):
        ratios.add_row(pair.replace("/", " / "), f"{time:.3f}", number_or_blank(memory, ".3f"))
    console.print(ratios)
    for sentence in _about(report):
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)


def _cells(result: WayResult) -> Iterator[str]:
    from shardrt.bench.state import DURABLE

    peaks = result.peaks
    yield result.label
    yield f"{result.seconds:.2f}"
    yield number_or_blank(None if peaks is None else max(peaks) / 1e6, ".0f")
    yield number_or_blank(None if peaks is None else sum(peaks) / len(peaks) / 1e6, ".0f")
    yield f"{result.file_bytes / 1e6:.0f}"
    yield "" if result.name.endswith("load") else "yes" if result.name in DURABLE else "no"


def _about(report: StateReport) -> Iterator[str]:
    from shardrt.bench.state import BEHIND

    yield (
        "s: median over the rounds, of the slowest rank. MB rank, mean: most memory held above what there was before, "
        "on the fullest rank and on average (VmHWM). synced: whether files are on the disk when it is done; torch.save "
        "leaves them to the system. Files were just written when they are loaded, and rt.load verifies them."
    )
    yield "DCP: torch.distributed.checkpoint, of DTensors cut along their first dim."
    yield "x time: medians of the rounds' ratios. x memory: of the fullest ranks."
    more = report[BEHIND].more
    yield (
        f"Asynchronous: the call took {more['call_seconds']:.2f} s (the first one of a run "
        f"{more['first_call_seconds']:.2f} s), and the save was committed after {more['committed_seconds']:.2f} s and "
        f"{more['steps_meanwhile']:g} steps of {more['step_seconds']:.2f} s. Its s is what training lost in all: the "
        "call, and by how much those steps were slower."
    )

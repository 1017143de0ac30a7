"""``shardrt demo``: train a small model on a few ranks of this machine, sharded and unsharded, and compare."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from shardrt.cli.progress import Reading, rank_progress, ranks_in_words
from shardrt.demo.settings import RECIPES, DemoSettings
from shardrt.launch import launch_ranks

if TYPE_CHECKING:
    from shardrt.demo.report import DemoReport

_DEFAULTS = DemoSettings()
_COUNT = click.IntRange(min=1)


@click.command()
@click.option("--ranks", default=_DEFAULTS.ranks, show_default=True, type=_COUNT, help="Processes to train with.")
@click.option("--steps", default=_DEFAULTS.steps, show_default=True, type=_COUNT, help="Steps of each run.")
@click.option("--batch", default=_DEFAULTS.batch, show_default=True, type=_COUNT, help="Windows of text per rank.")
@click.option("--optimizer", default=_DEFAULTS.optimizer, show_default=True, help=f"One of {', '.join(RECIPES)}.")
@click.option(
    "--partitioner", default=_DEFAULTS.partitioner, show_default=True, help="As `shardrt plugins` lists them."
)
@click.option("--backend", default=_DEFAULTS.backend, show_default=True, help="One for the CPU, or auto.")
@click.option("--schedule", default=_DEFAULTS.schedule, show_default=True, help="As `shardrt plugins` lists them.")
@click.option("--bucket-mb", default=None, type=float, help="Megabytes that travel together; default: the schedule's.")
@click.option("--seed", default=_DEFAULTS.seed, show_default=True, type=click.IntRange(min=0, max=2**31), help="Seed.")
@click.option(
    "--patience", default=120.0, show_default=True, type=click.FloatRange(min=1), help="Seconds without news."
)
@click.option("--verbose", is_flag=True, help="Let through what ranks print, to standard error.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@click.pass_context
def demo(ctx: click.Context, /, patience: float, verbose: bool, as_json: bool, **arguments: Any) -> None:
    """Train a small model on Python's own sources, sharded and unsharded, and compare the two.

    Runs on the CPU, one thread per rank. Exits with 1 if a rank fails or if ranks end with different parameters.
    """
    from shardrt.demo.recipes import check_settings
    from shardrt.demo.report import DemoReport
    from shardrt.demo.text import read_corpus

    settings = DemoSettings(**arguments)
    check_settings(settings)
    read_corpus()  # a Python without sources is better noticed before ranks are started
    started = time.monotonic()
    quiet = as_json or verbose
    with rank_progress(ranks=settings.ranks, steps=2 * settings.steps, read=_reader(settings), quiet=quiet) as on_event:
        answers = launch_ranks(
            "shardrt.demo.worker",
            settings.to_json(),
            ranks=settings.ranks,
            on_event=on_event,
            patience=patience,
            verbose=verbose,
        )
    report = DemoReport(settings=settings, answers=answers, seconds=time.monotonic() - started)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        _show(report)
    ctx.exit(0 if report.ranks_agree else 1)


def _reader(settings: DemoSettings) -> Reading:
    before = {"sharded": 0, "unsharded": settings.steps}

    def read(event: Any) -> tuple[str, int, str]:
        return f"training {event['run']}", before[event["run"]] + event["step"], f"loss {event['loss']:.3f}"

    return read


def _show(report: DemoReport) -> None:
    from rich.console import Console
    from rich.table import Table

    settings = report.settings
    table = Table(
        title=f"{report.answers[0]['parameters']:,} parameters, {settings.optimizer}, {settings.steps} steps on "
        f"{ranks_in_words(settings.ranks)}: {settings.partitioner}, {report.answers[0]['sharded']['backend']}, "
        f"{settings.schedule}",
        title_justify="left",
    )
    table.add_column("", no_wrap=True)
    for heading in ("sharded", "unsharded", ""):
        table.add_column(heading, justify="right")
    for row in _rows(report):
        table.add_row(*row)
    console = Console()
    console.print(table)
    for sentence in _sentences(report):
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)


def _rows(report: DemoReport) -> Iterator[tuple[str, str, str, str]]:
    losses, twin = report.losses("sharded"), report.losses("unsharded")
    yield "first loss", f"{losses[0]:.6f}", f"{twin[0]:.6f}", ""
    yield "final loss", f"{losses[-1]:.6f}", f"{twin[-1]:.6f}", ""
    yield "largest parameter difference", "", "", f"{report.largest_difference:.3g}"
    mine, whole = report.optimizer_bytes("sharded"), report.optimizer_bytes("unsharded")
    yield "optimizer bytes per rank, at most", f"{mine:,}", f"{whole:,}", f"{report.saving:.1%} saved"
    yield "imbalance of the plan", f"{report.imbalance:.3f}", "", "1 is even"
    sent, ratio = max(report.sent_per_step), report.traffic_ratio
    if ratio is not None:
        yield "bytes sent per step and rank, at most", f"{sent:,.0f}", "", ""
        yield "the least possible, on average", f"{report.least_bytes_per_step:,.0f}", "", f"ratio {ratio:.4f}"
    yield "ms per step (for information)", f"{report.step_ms('sharded'):.1f}", f"{report.step_ms('unsharded'):.1f}", ""


def _sentences(report: DemoReport) -> Iterator[str]:
    ranks = report.settings.ranks
    if not report.ranks_agree:
        yield "The ranks ended with different parameters: this must never happen, please report it."
        return
    same = (
        "The same training to the last bit"
        if report.largest_difference == 0
        else f"The same training up to rounding ({report.largest_difference:.1g}: many ranks add in another order)"
    )
    if ranks == 1:
        yield f"{same}: alone, shardrt is the plain optimizer. Try more ranks: shardrt demo --ranks 2"
        return
    ratio = report.traffic_ratio or 1.0
    wire = "no more bytes on the wire than one all-reduce" if ratio < 1.01 else f"{ratio:.2f} times the least bytes"
    yield f"{same}, with {report.saving:.0%} less optimizer state on the fullest rank and {wire}."
    other = "flat" if report.settings.partitioner == "greedy" and report.settings.optimizer != "muon" else "greedy"
    yield f"Try next: shardrt demo --ranks 4 --partitioner {other}, or in your trainer: opt = rt.optimizer(...)"

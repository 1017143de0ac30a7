"""What benchmarks with several contestants print: the bar meanwhile, then two tables and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import click

from shardrt.cli.progress import rank_progress

if TYPE_CHECKING:
    from rich.table import Table

    from shardrt.bench.contest import ContestReport, ContestResult, ContestSettings
    from shardrt.launch import OnEvent


def contest_options(*, steps: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options that every contest has; ``steps`` is how many it takes by default."""
    options = (
        click.option("--ranks", default=2, show_default=True, type=click.IntRange(min=2), help="Processes."),
        click.option(
            "--steps", default=steps, show_default=True, type=click.IntRange(min=1), help="Timed steps per round."
        ),
        click.option(
            "--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Rounds to take medians of."
        ),
        click.option(
            "--size",
            default="small",
            show_default=True,
            type=click.Choice(["small", "40m"]),
            help="1 or 40 million parameters.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else."),
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def contest_progress(settings: ContestSettings, *, quiet: bool) -> AbstractContextManager[OnEvent]:
    """A bar over all steps of all contestants."""
    labels = settings.contestants
    return rank_progress(
        ranks=settings.ranks,
        steps=settings.all_steps,
        read=lambda event: (labels[event["contestant"]], event["done"], ""),
        quiet=quiet,
    )


def show_contest(
    report: ContestReport,
    *,
    where: str,
    sentences: Iterable[str],
    hidden: Mapping[str, float | None] | None = None,
) -> None:
    """Print the tables; ``hidden`` is the share of communication that was, for those contestants that tell it."""
    from rich.console import Console

    settings = report.settings
    console = Console()
    console.print(
        f"{report.parameters:,} parameters, AdamW, {settings.ranks} ranks over Gloo {where}, "
        f"{settings.rounds} rounds of {settings.steps} steps",
        soft_wrap=True,
        highlight=False,
    )
    # Two tables: one would be wider than a terminal's 80 columns, and rich would cut its numbers.
    times = _table("ms/step", "middle half", "fastest" if hidden is None else "hidden", "x DDP", "x ZeRO")
    costs = _table("state, MB", "wire, MB", "x least", "differs by", *([] if hidden is None else ["ranks"]))
    for result in report.results:
        times.add_row(*_time_cells(report, result, hidden))
        agreement = "agree" if result.ranks_agree else "differ"
        costs.add_row(*_cost_cells(report, result), *([] if hidden is None else [agreement]))
    console.print(times)
    console.print(costs)
    for sentence in (*_about(report, hidden is not None), *sentences, *_complaints(report)):
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)


def number_or_blank(value: float | None, style: str) -> str:
    """A number for a table, where there is one.

    Example:
        >>> from shardrt.cli.contest import number_or_blank
        >>> number_or_blank(2.345, ".1f"), number_or_blank(None, ".1f")
        ('2.3', '')
    """
    return "" if value is None else format(value, style)


def _time_cells(
    report: ContestReport, result: ContestResult, hidden: Mapping[str, float | None] | None
) -> Iterator[str]:
    from shardrt.bench.contest import DDP, TORCH_ZERO

    low, high = result.quartiles
    yield result.label
    yield f"{result.seconds * 1e3:.1f}"
    yield f"{low * 1e3:.0f}-{high * 1e3:.0f}"
    yield f"{result.fastest * 1e3:.1f}" if hidden is None else number_or_blank(hidden.get(result.name), ".1%")
    yield f"{result.times(report[DDP]):.3f}"
    yield f"{result.times(report[TORCH_ZERO]):.3f}"


def _cost_cells(report: ContestReport, result: ContestResult) -> Iterator[str]:
    wire = result.least_wire_bytes
    yield result.label
    yield f"{result.optimizer_bytes / 1e6:.1f}"
    yield number_or_blank(None if wire is None else wire / 1e6, ".2f")
    yield number_or_blank(None if wire is None else wire / report.minimum_wire_bytes, ".3f")
    yield f"{result.largest_difference:.3g}"


def _table(*headings: str) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _about(report: ContestReport, with_hidden: bool) -> Iterator[str]:
    yield "Time: medians of the slowest rank's steps; x DDP and x ZeRO (torch's): medians of the rounds' ratios."
    if with_hidden:
        yield (
            "Hidden: the share of the time in which bytes travelled that training did not wait for, from timelines of "
            "a few more steps."
        )
    yield "State: the optimizer's, on the fullest rank. Differs: the largest difference from DDP + AdamW's parameters."
    yield (
        "Wire: per step and rank, in the quietest round, as the network device counts (TCP's overhead and other "
        "programs' traffic included); the least is 2 (N - 1) / N of the model, "
        f"here {report.minimum_wire_bytes / 1e6:.2f} MB."
    )


def _complaints(report: ContestReport) -> Iterator[str]:
    broken = ", ".join(result.label for result in report.results if not result.ranks_agree)
    if broken:
        yield f"The ranks ended with different parameters under: {broken}. This must never happen, please report it."

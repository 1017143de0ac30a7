"""``shardrt bench all``: the full run."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardrt.bench.scenarios import SCENARIOS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shardrt.bench.full_run import OnProgress, Progress
    from shardrt.bench.telling import Document

STANDARD_OUTPUT = "-"


def _help() -> str:
    from shardrt.bench.full_run import DEFAULT_ROUNDS, DEFAULT_STEPS

    lines = [f"{name:<16}{one.minutes:>4.1f} min  {one.about}" for name, one in SCENARIOS.items()]
    whole = sum(one.minutes for one in SCENARIOS.values())
    return "\n".join(
        [
            "Run shardrt's strategies and schedules beside all peers that are installed, in every scenario.",
            "",
            "Everybody trains the same model on the same data with the same AdamW, one thread per rank, in interleaved "
            "rounds. Peers and links that are missing here are named with the reason. Exits with 1 if a scenario fails "
            "or if somebody did not train what DDP + AdamW trains.",
            "",
            f"Scenarios, and how long each takes with 40 million parameters, {DEFAULT_ROUNDS} rounds of "
            f"{DEFAULT_STEPS} steps and one backend, on two cores ({whole:.0f} min in all; each further backend "
            "adds about half of it to those on loopback, DeepSpeed a third):",
            "",
            "\b",
            *lines,
        ]
    )


@click.command(name="all", help=_help())
@click.option(
    "--scenario", "scenarios", multiple=True, metavar="NAME", help="Only this one, and others named likewise."
)
@click.option("--size", default="40m", show_default=True, type=click.Choice(["small", "40m"]), help="Of the models.")
@click.option("--steps", type=click.IntRange(min=1), show_default="2", help="Timed steps per round.")
@click.option("--rounds", type=click.IntRange(min=1), show_default="2", help="Rounds to take medians of.")
@click.option("--backend", "backends", multiple=True, metavar="NAME", help="For shardrt; default: all that run here.")
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="Of each scenario's contestants only this one, others that are named likewise, and DDP + AdamW; shardrt's by "
    "strategy (zero1, full_shard) or strategy and schedule (zero1/priority).",
)
@click.option("--everybody", is_flag=True, help="Ask everybody in every scenario; takes hours.")
@click.option(
    "--json",
    "json_to",
    is_flag=False,
    flag_value=STANDARD_OUTPUT,
    metavar="[FILE]",
    help="Write the document, after each scenario.",
)
@click.option("--html", "html_to", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with plots.")
@click.option(
    "--markdown", "markdown_to", is_flag=False, flag_value=STANDARD_OUTPUT, metavar="[FILE]", help="Write the tables."
)
@click.option(
    "--from",
    "earlier",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Measure nothing: show the document that an earlier run wrote with --json.",
)
@click.option(
    "--patience", default=300.0, show_default=True, type=click.FloatRange(min=1), help="Seconds without news."
)
@click.pass_context
def full(
    ctx: click.Context,
    /,
    json_to: str | None,
    html_to: Path | None,
    markdown_to: str | None,
    earlier: Path | None,
    patience: float,
    **arguments: Any,
) -> None:
    """Measure, or read what was measured, and show it in every form that was asked for."""
    from shardrt.bench.full_run import FullSettings, measure_all
    from shardrt.bench.markdown import render_markdown
    from shardrt.bench.page import render_page
    from shardrt.bench.telling import read_document

    files = [Path(one) for one in (json_to, markdown_to) if one not in (None, STANDARD_OUTPUT)]
    _check_writable([*files, *([] if html_to is None else [html_to])])
    quiet = STANDARD_OUTPUT in (json_to, markdown_to)
    document: Document
    if earlier is not None:
        document = read_document(earlier)
    else:
        settings = FullSettings(**{key: value for key, value in arguments.items() if value is not None})
        with _progress(quiet=quiet) as on_progress:
            document = measure_all(
                settings,
                command=_command(),
                on_progress=on_progress,
                so_far=None if json_to in (None, STANDARD_OUTPUT) else partial(_write_json, json_to),
                patience=patience,
            )
    if json_to is not None:  # first: what was measured is kept, whatever showing it does
        _write_json(json_to, document)
    if markdown_to is not None:
        _write(markdown_to, render_markdown(document))
    if html_to is not None:
        html_to.write_text(render_page(document), encoding="utf-8")
    if not quiet:
        show_full(document)
    ctx.exit(0 if is_well(document) else 1)


def is_well(document: Document) -> bool:
    """Whether nothing failed and everybody trained the same."""
    return all(
        one["state"] == "left out" or (one["state"] == "measured" and one["all_alike"]) for one in document["scenarios"]
    )


def _command() -> str:
    return shlex.join(["shardrt", *sys.argv[1:]])


def _check_writable(paths: Sequence[Path]) -> None:
    """Before minutes are spent: a directory that is not there would be found out at the end."""
    from shardrt.errors import ConfigError

    for path in paths:
        if not path.absolute().parent.is_dir():
            raise ConfigError(
                f"there is no directory {str(path.absolute().parent)!r} to write {path.name!r} to; make it"
            )


def _write_json(to: str, document: Document) -> None:
    _write(to, json.dumps(document, indent=2, allow_nan=False) + "\n")


def _write(to: str, text: str) -> None:
    if to == STANDARD_OUTPUT:
        click.echo(text, nl=False)
    else:
        Path(to).write_text(text, encoding="utf-8")


@contextmanager
def _progress(*, quiet: bool) -> Iterator[OnProgress]:
    """A bar on standard error with what is going on and how long is left; a line per scenario where that is a file."""
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    from shardrt.bench.telling import minutes

    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    seen = 0
    with Bar(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as bar:
        task = bar.add_task("starting", total=1.0, left="")

        def on_progress(now: Progress) -> None:
            nonlocal seen
            left = f"about {minutes(now.seconds_left)} left"
            bar.update(task, description=f"[{now.number}/{now.count}] {now.doing}", completed=now.share, left=left)
            if now.number > seen and not quiet:
                seen = now.number
                console.print(f"{now.number}/{now.count} {now.title}, {left}", markup=False, highlight=False)

        yield on_progress


def show_full(document: Document) -> None:
    """Print a table for each scenario, and the ratios of all at the end."""
    from rich.console import Console

    from shardrt.bench.telling import facts, headlines, measured

    console = Console()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False, highlight=False)

    for name, value in facts(document):
        say(f"{name}: {value}")
    for scenario in document["scenarios"]:
        _show_scenario(scenario, console, say)
    rows = [one for scenario in measured(document) for one in headlines(scenario)]
    if rows:
        say("\nIn short: the fastest of ours that shards as much, over each backend, in times of a peer")
        table = _table("scenario", "shardrt", "beside", "time", "memory")
        for one in rows:
            memory = "" if one.memory is None else f"{one.memory:.2f}"
            ours = one.ours.removeprefix("shardrt ")
            table.add_row(one.scenario, ours, one.rival, f"{one.time:.2f}", memory)
        console.print(table)
    say(
        "Time: medians of the slowest rank's steps; ratios are medians of the rounds' ratios. Exposed: what is left of "
        "a step without forward and backward alone and without AdamW. Peak: the fullest rank's, above what there was "
        "before. Wire: per step and rank, as the network device counts; with a link what crosses it."
    )


def _show_scenario(scenario: Document, console: Console, say: Any) -> None:
    from shardrt.bench.telling import absences, by_level, complaints, megabytes, milliseconds, ratio, setting

    say(f"\n{scenario['title']}: {scenario['about']}")
    if scenario["state"] != "measured":
        say(f"{scenario['state']}: {scenario['reason']}")
        return
    say(f"{setting(scenario)}.")
    # Two tables: one would be wider than a terminal's 80 columns.
    times = _table("", "ms/step", "middle half", "x DDP", "x ZeRO")
    costs = _table("", "exposed", "step", "peak MB", "wire MB")
    for _, rows in by_level(scenario):
        for row in rows:
            low, high = row["ms_per_step_quartiles"]
            spread = f"{milliseconds(low)}-{milliseconds(high)}"
            ratios = (ratio(row["times_ddp_adamw"]), ratio(row["times_torch_zero"]))
            times.add_row(row["label"], milliseconds(row["ms_per_step"]), spread, *ratios)
            parts = (milliseconds(row["exposed_ms"]), milliseconds(row["update_ms"]))
            costs.add_row(row["label"], *parts, megabytes(row["peak_bytes"]), megabytes(row["wire_bytes_per_step"]))
    for one in scenario["missing"]:
        times.add_row(one["label"], "missing")
    console.print(times)
    console.print(costs)
    limits = {row["wire_limit_ms"] for row in scenario["contestants"]} - {None}
    if limits:
        say(
            f"The wire's limit: {' and '.join(milliseconds(one) for one in sorted(limits))} ms (ZeRO-3 needs the more)."
        )
    for who, why in absences(scenario):
        say(f"{who}: {why}")
    for told in complaints(scenario):
        say(told)


def _table(*headings: str) -> Table:
    from rich.table import Table

    table = Table()
    texts = {"", "scenario", "shardrt", "beside"}
    for heading in headings:
        table.add_column(heading, justify="left" if heading in texts else "right", no_wrap=True)
    return table

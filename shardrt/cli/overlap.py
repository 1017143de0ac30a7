"""``shardrt bench overlap``: what each schedule makes of a slow network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardrt.cli.contest import contest_options, contest_progress, show_contest

if TYPE_CHECKING:
    from shardrt.bench.overlap import OverlapReport


@click.command()
@click.option(
    "--link",
    default="none",
    show_default=True,
    metavar="RATE",
    help="Two hosts with this rate between them, such as 1gbit and 2 ranks (needs root and iproute2); none: loopback.",
)
@contest_options(steps=5)
@click.option(
    "--schedule",
    "schedules",
    multiple=True,
    metavar="NAME",
    help="Only this one, and others that are named likewise; default: all that come with shardrt.",
)
@click.option("--partitioner", default="bucket", show_default=True, help="As `shardrt plugins` lists them.")
@click.option("--bucket-mb", default=None, type=float, help="Megabytes that travel together; default: the schedule's.")
@click.option(
    "--timeline",
    default=None,
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the recorded timelines here, in a directory for each schedule.",
)
@click.option(
    "--patience", default=120.0, show_default=True, type=click.FloatRange(min=1), help="Seconds without news."
)
@click.pass_context
def overlap(
    ctx: click.Context,
    /,
    schedules: tuple[str, ...],
    timeline: Path | None,
    patience: float,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Train with every schedule, with DDP and with torch's ZeRO, and compare, best over a slow link.

    Runs on the CPU over Gloo, one thread per rank. Exits with 1 if a rank fails or if ranks end with different
    parameters.
    """
    from shardrt.bench.overlap import OverlapSettings, built_in_schedules, measure_overlap

    settings = OverlapSettings(schedules=schedules or built_in_schedules(), **arguments)
    with contest_progress(settings, quiet=as_json) as on_event:
        report = measure_overlap(settings, timelines=timeline, on_event=on_event, patience=patience)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        _show(report, timeline)
    ctx.exit(0 if report.ranks_agree else 1)


def _show(report: OverlapReport, timeline: Path | None) -> None:
    wire = report.wire_seconds
    settings = report.settings
    sentences = [f"shardrt: partitioner {settings.partitioner}, buckets of {_bucket_size(settings.bucket_mb)}."]
    if wire is not None:
        sentences.append(
            f"The wire's limit: the least bytes of a step take {wire * 1e3:,.0f} ms on a link of {settings.link}, both "
            "ways at once."
        )
    if timeline is not None:
        sentences.append(f"The timelines are in {timeline}.")
    where = "on loopback" if wire is None else f"on an emulated link of {settings.link}"
    show_contest(report, where=where, sentences=sentences, hidden=report.hidden)


def _bucket_size(bucket_mb: float | None) -> str:
    return "the size each schedule chooses" if bucket_mb is None else f"{bucket_mb:g} MB"

"""``shardrt bench strategies``: what each strategy holds and moves, beside the formulas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from shardrt.cli.progress import rank_progress

if TYPE_CHECKING:
    from rich.table import Table

    from shardrt.bench.strategies import StrategiesReport, StrategyResult


_PHASES = {"forward": "fwd", "backward": "bwd", "step": "step"}


@click.command()
@click.option(
    "--ranks",
    multiple=True,
    type=click.IntRange(min=2),
    help="Processes, and other numbers of them that are given likewise; default: 2 and 4, with a link 4.",
)
@click.option("--steps", default=3, show_default=True, type=click.IntRange(min=1), help="Steps that are counted.")
@click.option(
    "--size",
    default="small",
    show_default=True,
    type=click.Choice(["small", "40m"]),
    help="1 or 40 million parameters.",
)
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    metavar="NAME",
    help="Only this one, and others that are named likewise; default: all.",
)
@click.option("--schedule", default=None, help="As `shardrt plugins` lists them; default: the runtime's.")
@click.option("--partitioner", default=None, help="As `shardrt plugins` lists them; default: the runtime's.")
@click.option(
    "--prefetch",
    default="pre",
    show_default=True,
    type=click.Choice(["pre", "post", "none"]),
    help="Which unit's parameters are asked for ahead of their use; none: two units are never whole at once.",
)
@click.option("--divide-units", is_flag=True, help="Gather large units layer by layer.")
@click.option(
    "--link",
    default="none",
    show_default=True,
    metavar="RATE",
    help="4 ranks on two hosts with this rate between them, such as 1gbit (needs root and iproute2); none: loopback.",
)
@click.option(
    "--patience", default=120.0, show_default=True, type=click.FloatRange(min=1), help="Seconds without news."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def strategies(
    ranks: tuple[int, ...], strategies: tuple[str, ...], patience: float, as_json: bool, **arguments: Any
) -> None:
    """Count what each strategy of rt.shard holds and sends, beside the formulas of ZeRO.

    Runs on the CPU over Gloo, one thread per rank. Nothing is timed, so other programs do not matter. A formula that is
    not met is told, and is no failure of the command.
    """
    from shardrt.bench.overlap import NO_LINK
    from shardrt.bench.strategies import STRATEGIES, StrategiesSettings, count_strategies

    settings = StrategiesSettings(
        ranks=ranks or ((2, 4) if arguments["link"] == NO_LINK else (4,)),
        strategies=strategies or tuple(STRATEGIES),
        **arguments,
    )
    with rank_progress(
        ranks=max(settings.ranks),
        steps=settings.all_runs,
        read=lambda event: (event["strategy"], event["done"], ""),
        quiet=as_json,
    ) as on_event:
        report = count_strategies(settings, on_event=on_event, patience=patience)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        show_strategies(report)


def show_strategies(report: StrategiesReport, *, memory: bool = True, traffic: bool = True) -> None:
    """Print the tables and what they mean."""
    from rich.console import Console

    from shardrt.bench.overlap import NO_LINK

    settings = report.settings
    linked = settings.link != NO_LINK
    where = f"two hosts with a link of {settings.link}" if linked else "loopback"
    console = Console()
    console.print(
        f"{report.parameters:,} parameters ({report.parameter_bytes / 1e6:,.2f} MB), AdamW, Gloo on {where}, schedule "
        f"{report.schedule}, partitioner {report.partitioner} where parameters stay whole, prefetch "
        f"{settings.prefetch}{', large units divided' if settings.divide_units else ''}",
        soft_wrap=True,
        highlight=False,
    )
    tables = [*([_rest_table(report), _peak_table(report)] if memory else []), *([_traffic_table(report)] * traffic)]
    if linked:
        tables.append(_link_table(report))
    for table in tables:
        console.print(table)
    for sentence in _about(report, memory=memory, traffic=traffic, linked=linked):
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)


def _rest_table(report: StrategiesReport) -> Table:
    table = _table("Held at rest, on the fullest rank", "MB", "formula", "ratio", "units +", "met")
    for result in report.results:
        formula = result.theory.held
        _row(
            table,
            result,
            _mb(result.rest_bytes),
            *_against(result, result.rest_bytes, formula),
            _is(result.rest_within),
        )
    return table


def _peak_table(report: StrategiesReport) -> Table:
    table = _table("Held at most in a step, on the fullest rank", "MB", "in", "formula", "ratio", "units +", "met")
    for result in report.results:
        compared = _against(result, result.peak_bytes, result.peak_formula)
        _row(table, result, _mb(result.peak_bytes), _PHASES[result.peak_phase], *compared, _is(result.peak_within))
    return table


def _traffic_table(report: StrategiesReport) -> Table:
    from shardrt.bench.overlap import NO_LINK
    from shardrt.bench.strategies import UNSHARDED

    on_device = report.settings.link == NO_LINK
    table = _table("Sent per step and rank", "MB", "formula", "ratio", "x plain", "met", "device")
    for result in report.results:
        if result.strategy != UNSHARDED:
            _row(
                table,
                result,
                _mb(result.sent_bytes),
                _mb(result.theory.sent),
                f"{result.sent_bytes / result.theory.sent:.4f}",
                f"{result.sent_bytes / result.theory.sent_roughly:.4f}",
                _is(result.traffic_within),
                "" if result.device_bytes is None or not on_device else _mb(result.device_bytes / result.ranks),
            )
    return table


def _link_table(report: StrategiesReport) -> Table:
    from shardrt.bench.strategies import UNSHARDED

    table = _table("Over the link per step, of all ranks", "MB", "formula", "ratio", "x model")
    for result in report.results:
        if result.strategy != UNSHARDED and result.device_bytes is not None:
            _row(
                table,
                result,
                _mb(result.device_bytes),
                _mb(result.theory.crossing),
                f"{result.device_bytes / result.theory.crossing:.4f}",
                f"{result.device_bytes / report.parameter_bytes:.3f}",
            )
    return table


def _against(result: StrategyResult, nbytes: float, formula: float) -> tuple[str, str, str]:
    return _mb(formula), f"{nbytes / formula:.3f}", f"{result.units_over(nbytes, formula):.2f}"


def _row(table: Table, result: StrategyResult, *cells: str) -> None:
    last = table.rows[-1] if table.rows else None
    if last is not None and str(result.ranks) != list(table.columns[0].cells)[-1]:
        table.add_section()
    table.add_row(str(result.ranks), result.strategy, *cells)


def _table(title: str, *headings: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("N", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _mb(nbytes: float) -> str:
    return format(nbytes / 1e6, ",.2f" if nbytes < 1e8 else ",.1f" if nbytes < 1e9 else ",.0f")


def _is(within: bool) -> str:
    return "yes" if within else "NO"


def _about(report: StrategiesReport, *, memory: bool, traffic: bool, linked: bool) -> Iterator[str]:
    from shardrt.bench.strategies import MEMORY_TOLERANCE, SHARD_SIZE, STRATEGIES, TOKENS, TRAFFIC_TOLERANCE

    first = report.results[0]
    if memory:
        yield (
            f"Memory: all that torch's allocator handed out. Formula: parameters, gradients and AdamW's state, each "
            f"divided where it is shared; at the peak also the unsharded model's activations of {TOKENS} tokens, "
            f"{first.activation_bytes / 1e6:.2f} MB."
        )
        yield (
            f"Met: at most {MEMORY_TOLERANCE:.0%} and one unit above the formula; the largest unit has "
            f"{first.unit_bytes / 1e6:.2f} MB. Units +: how far above it, in such units."
            " In: forward, backward or step."
        )
    if traffic:
        yield (
            "Sent: what our communicators count, the mean over ranks. Formula: 2 (N - 1) / N of the model, 3 (N - 1) / "
            f"N where parameters are sharded, of which the root ({report.root_bytes / 1e6:.2f} MB) is gathered once "
            "only; x plain: as if it were not."
        )
        yield f"Met: within {TRAFFIC_TOLERANCE:.0%}. Device: as the network counts in the quietest step."
    if linked:
        yield (
            "Over the link: all ranks, both ways, as its device counts. Formula: hybrid strategies send "
            "only what replicas average; the others send to each rank directly, half of which is on the other host."
        )
    if not linked and any(STRATEGIES[name].hybrid for name in report.settings.strategies):
        yield f"Hybrid: groups of {SHARD_SIZE} ranks, replicated; that takes {2 * SHARD_SIZE} ranks or more."

"""``shardrt ckpt diff``: what differs between two checkpoints, and by how much."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from shardrt.cli.ckpt.options import json_option

if TYPE_CHECKING:
    from shardrt.checkpoint.comparing import Difference


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Rows of the table.")
@json_option
def diff(a: str, b: str, limit: int, as_json: bool) -> None:
    """Tell which tensors, values and options differ between two checkpoints, and by how much.

    A and B are each what was given to rt.save (its latest is taken) or the directory of one checkpoint. They may be
    for different numbers of ranks. Elements are compared by their bits. Random states are not compared. Exit code 1 if
    anything differs.
    """
    import shardrt
    from shardrt.checkpoint.comparing import compare_states, state_bytes
    from shardrt.checkpoint.progress import progress_bar
    from shardrt.cli.ckpt.opening import open_path

    registry = shardrt.load_registry()
    left, right = open_path(a, None, registry), open_path(b, None, registry)
    one, other = left.portable(), right.portable()
    with progress_bar("comparing", state_bytes(one), show=False if as_json else None) as advance:
        found = list(compare_states(one, other, advance))
    if as_json:
        document = {
            "a": left.where,
            "b": right.where,
            "same": not found,
            "differences": [difference.to_json() for difference in found],
        }
        click.echo(json.dumps(document, indent=2))
    else:
        _show(found, left.where, right.where, limit)
    if found:
        click.get_current_context().exit(1)


def _show(found: list[Difference], a: str, b: str, limit: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not found:
        console.print(Text(f"the same state in {a} and {b}"), soft_wrap=True)
        return
    console.print(Text(f"a: {a}\nb: {b}"), soft_wrap=True)
    table = Table(pad_edge=False)
    for heading in ("what", "differs in", "how"):
        table.add_column(heading, overflow="fold")
    for one in found[:limit]:
        table.add_row(Text(one.name), one.kind, Text(_how(one)))
    console.print(table)
    more = f", of which {limit} are shown" if len(found) > limit else ""
    console.print(f"{len(found)} difference{'s' if len(found) != 1 else ''}{more}", highlight=False)


def _how(one: Difference) -> str:
    parts: list[Any] = []
    if one.kind.startswith("only"):
        parts.append(one.a if one.a is not None else one.b)
    elif one.a is not None:
        parts.append(f"{one.a} and {one.b}")
    if one.differing is not None:
        parts.append(f"{one.differing:,} of {one.elements:,} elements, by up to {one.max_abs:.4g}")
    return "; ".join(parts)

"""``shardrt ckpt inspect``: which checkpoints there are, and what is in one. Reads manifests only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from shardrt.cli.ckpt.options import json_option, step_option
from shardrt.cli.ckpt.telling import size_in_words

if TYPE_CHECKING:
    from shardrt.checkpoint.series import SaveName, Series
    from shardrt.protocols import Place
    from shardrt.registry import Registry


@click.command()
@click.argument("path")
@step_option
@click.option("--limit", type=click.IntRange(min=1), default=40, show_default=True, help="Rows of the tables.")
@json_option
def inspect(path: str, step: int | None, limit: int, as_json: bool) -> None:
    """Tell which checkpoints there are, or what is in one.

    PATH is what was given to rt.save, and its checkpoints are listed; with --step, or where PATH is the directory of
    one checkpoint, what is in that one is told. Only manifests are read: verify reads the rest.
    """
    import shardrt
    from shardrt.checkpoint.opened import open_checkpoint
    from shardrt.checkpoint.series import MANIFEST, Series
    from shardrt.choosing import choose_place
    from shardrt.cli.ckpt.contents import describe_checkpoint, show_checkpoint
    from shardrt.cli.ckpt.opening import directory_in

    registry = shardrt.load_registry()
    place = choose_place(registry)(path)
    if step is not None or MANIFEST in place.list() or not Series(place).names():
        document = describe_checkpoint(open_checkpoint(place, registry, directory_in(place, step)))
        show = show_checkpoint
    else:
        document, show = describe_series(place, registry), _show_series
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        show(document, limit)


def describe_series(place: Place, registry: Registry) -> dict[str, Any]:
    """All checkpoints of a root, as plain JSON values."""
    from shardrt.checkpoint.series import Series
    from shardrt.errors import NoCheckpointError

    series = Series(place)
    try:
        latest = str(series.latest())
    except NoCheckpointError:
        latest = None
    rows = [_row(series, name, registry) for name in series.names()]
    return {"path": place.root, "latest": latest, "pointer": series.pointer_problem(), "checkpoints": rows}


def _row(series: Series, name: SaveName, registry: Registry) -> dict[str, Any]:
    from shardrt.checkpoint.opened import open_checkpoint
    from shardrt.errors import CheckpointError

    place = series.place
    size = sum(place.size(f"{name}/{file}") for file in place.list(str(name)) if not file.endswith("/"))
    row: dict[str, Any] = {"name": str(name), "step": name.step, "created": None, "ranks": None, "bytes": size}
    if not series.is_complete(name):
        return {**row, "state": "leftover" if series.is_leftover(name) else "being written"}
    try:
        manifest = open_checkpoint(place, registry, str(name)).manifest
    except CheckpointError as error:
        return {**row, "state": "damaged", "error": str(error)}
    return {**row, "created": manifest.created, "ranks": manifest.world_size, "state": "complete"}


def _show_series(document: Mapping[str, Any], limit: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(document["path"]), soft_wrap=True)
    table = Table(pad_edge=False)
    table.add_column("checkpoint", no_wrap=True)
    for heading in ("step", "ranks", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("created (UTC)", no_wrap=True)
    table.add_column("", no_wrap=True)
    rows = document["checkpoints"][-limit:]
    for row in rows:
        state = "latest" if row["name"] == document["latest"] else "" if row["state"] == "complete" else row["state"]
        ranks = "" if row["ranks"] is None else str(row["ranks"])
        created = (row["created"] or "")[:16].replace("T", " ")
        table.add_row(row["name"], str(row["step"]), ranks, size_in_words(row["bytes"]), created, state)
    console.print(table)
    if len(rows) < len(document["checkpoints"]):
        console.print(f"the last {len(rows)} of {len(document['checkpoints'])}", highlight=False)
    if document["pointer"] is not None:
        console.print(Text(document["pointer"]), soft_wrap=True)

"""``shardrt plugins``: what is installed, whether it can run here, and what is not in use and why."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import click

import shardrt
from shardrt.registry import HOOK_VERSION, BackendRecord, Registry
from shardrt.registry.probing import probe
from shardrt.registry.records import Record
from shardrt.registry.registry import Entry

KINDS = ("partitioners", "backends", "schedules", "state_formats", "places", "join_policies")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def plugins(as_json: bool) -> None:
    """List what installed plugins offer, and which plugins are not in use and why."""
    # What a plugin prints while it is imported or probed must not end up in the document.
    with contextlib.redirect_stdout(sys.stderr):
        document = describe_plugins(shardrt.load_registry())
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _show(document)


def describe_plugins(registry: Registry) -> dict[str, Any]:
    """Everything the command shows, as plain JSON values.

    Example:
        >>> import shardrt
        >>> from shardrt.cli.plugins import describe_plugins
        >>> class Plugin:
        ...     @shardrt.hookimpl
        ...     def shardrt_schedules(self):
        ...         yield shardrt.ScheduleRecord(name="mine", summary="my order", factory=object)
        >>> document = describe_plugins(shardrt.load_registry(plugins=[Plugin()]))
        >>> [schedule["available"] for schedule in document["schedules"] if schedule["name"] == "mine"]
        [True]
    """
    return {
        "shardrt": shardrt.__version__,
        "hook_version": ".".join(map(str, HOOK_VERSION)),
        **{kind: [_describe(entry) for entry in getattr(registry, kind)] for kind in KINDS},
        "plugins": [
            {
                "name": plugin.name,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "status": plugin.status,
                "problem": plugin.problem,
                "records": ["/".join(record.key) for record in plugin.records],
            }
            for plugin in registry.plugins
        ],
    }


def _describe(entry: Entry[Record]) -> dict[str, Any]:
    record = entry.record
    availability = probe(record)
    device = {"device_type": record.device_type} if isinstance(record, BackendRecord) else {}
    return {
        "name": record.name,
        **device,
        "summary": record.summary,
        "needs": list(record.needs),
        "available": availability.ok,
        "reason": availability.reason,
        "fix": availability.fix,
        "plugin": entry.plugin,
        "distribution": entry.distribution,
        "version": entry.version,
    }


def _show(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for kind in KINDS:
        title = kind.replace("_", " ")
        console.print(_table(title, document[kind]) if document[kind] else Text(f"{title}: none installed"))
    idle = [plugin for plugin in document["plugins"] if plugin["status"] != "ok"]
    if idle:
        console.print(Text("plugins not in use", style="italic"))
    for plugin in idle:
        console.print(Text(f"{plugin['status']}: {plugin['problem']}"), soft_wrap=True)


def _table(title: str, rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    has_device = "device_type" in rows[0]
    table = Table(title=title, title_justify="left")
    # Names are for copying: they stay whole while prose wraps.
    table.add_column("name", no_wrap=True)
    if has_device:
        table.add_column("device", no_wrap=True)
    for heading in ("summary", "available", "from"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        cells = [
            row["name"],
            *([row["device_type"]] if has_device else []),
            row["summary"],
            "yes" if row["available"] else f"no: {row['reason']}" + (f" ({row['fix']})" if row["fix"] else ""),
            f"{row['distribution']} {row['version']}".strip(),
        ]
        # Text and not str: square brackets in somebody's summary are no markup.
        table.add_row(*[Text(cell) for cell in cells])
    return table

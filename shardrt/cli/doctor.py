"""``shardrt doctor``: what works here, what does not and why, and a short proof on two ranks."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

import shardrt
from shardrt.cli.plugins import KINDS, describe_plugins
from shardrt.errors import ShardrtError

if TYPE_CHECKING:
    from rich.console import Console

_SMALL_SHARED_MEMORY = 2**30


@click.command()
@click.option("--smoke/--no-smoke", default=True, show_default=True, help="Train a few steps on two ranks.")
@click.option(
    "--patience", default=120.0, show_default=True, type=click.FloatRange(min=1), help="Seconds without news."
)
@click.option("--hang", "reports", default=None, metavar="DIR", help="Explain the hang reports in DIR instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@click.pass_context
def doctor(ctx: click.Context, smoke: bool, patience: float, reports: str | None, as_json: bool) -> None:
    """Find out what works here, and what would make the rest work.

    Exits with 1 if plugins cannot be loaded together or if the smoke test fails.

    With --hang DIR, explain instead what ranks wrote there when a wait failed (Runtime(hang_reports=DIR) or the
    variable SHARDRT_HANG_DIR): who waited for whom, where ranks parted, the likely cause and what to do.
    """
    if reports is not None:
        from shardrt.cli.hang import explain_directory

        explain_directory(reports, as_json=as_json)
        return
    with contextlib.redirect_stdout(sys.stderr):
        document = examine()
    if not as_json:
        _show(document)
    if smoke:
        document["smoke"] = _smoke(patience, quiet=as_json)
    document["ok"] = not document["problem"] and (document["smoke"] is None or document["smoke"]["ok"])
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _show_verdict(document)
    ctx.exit(0 if document["ok"] else 1)


def examine() -> dict[str, Any]:
    """Everything but the smoke test, as plain JSON values.

    Example:
        >>> from shardrt.cli.doctor import examine
        >>> document = examine()
        >>> document["problem"], [choice["backend"] for choice in document["auto"] if choice["device_type"] == "cpu"]
        ('', ['null', 'shm'])
    """
    from shardrt.demo import diagnosis

    document: dict[str, Any] = {
        "versions": diagnosis.versions(),
        "devices": diagnosis.devices(),
        "threads": diagnosis.threads(),
        "shared_memory": diagnosis.shared_memory(),
        "environment": diagnosis.environment(),
        **{kind: [] for kind in KINDS},
        "plugins": [],
        "auto": [],
        "problem": "",
        "smoke": None,
    }
    try:
        registry = shardrt.load_registry()
    except ShardrtError as error:
        document["problem"] = str(error)
        return document
    offered = describe_plugins(registry)
    document.update({key: offered[key] for key in (*KINDS, "plugins")})
    document["auto"] = [
        diagnosis.automatic(registry, device["type"], ranks) for device in document["devices"] for ranks in (1, 2)
    ]
    return document


def _smoke(patience: float, *, quiet: bool) -> dict[str, Any]:
    from rich.console import Console

    from shardrt.demo.diagnosis import smoke_test

    if quiet:
        return smoke_test(patience=patience)
    with Console(stderr=True).status("smoke test: two ranks on the CPU"):
        return smoke_test(patience=patience)


def _show(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    _show_pairs(console, "versions", document["versions"].items())
    _show_pairs(console, "machine", _machine(document))
    if document["environment"]:
        _show_pairs(console, "environment variables that are set", document["environment"].items())
    _show_pairs(console, "plugins", _offered(document))
    _show_pairs(
        console,
        "backends",
        [(f"{one['name']} ({one['device_type']})", _availability(one)) for one in document["backends"]],
    )
    _show_pairs(
        console,
        "what backend='auto' takes",
        [
            (f"{one['device_type']}, {one['ranks']} rank{'s' * (one['ranks'] > 1)}", one["reason"])
            for one in document["auto"]
        ],
    )
    for plugin in document["plugins"]:
        if plugin["status"] != "ok":
            console.print(Text(f"plugin {plugin['status']}: {plugin['problem']}", style="yellow"), soft_wrap=True)
    if document["problem"]:
        console.print(Text(f"problem: {document['problem']}", style="red"), soft_wrap=True)


def _show_verdict(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    smoke = document["smoke"]
    if smoke is None:
        told, style = "smoke test: left out", "yellow"
    elif smoke["ok"]:
        told, style = (
            f"smoke test: ok. {smoke['ranks']} ranks trained {smoke['steps']} steps over {smoke['backend']} in "
            f"{smoke['training_seconds']:.1f} s ({smoke['seconds']:.1f} s with starting), equal to each other and to "
            "the unsharded twin to the last bit",
            "green",
        )
    else:
        told, style = f"smoke test: failed after {smoke['seconds']:.1f} s: {smoke['error']}", "red"
    Console().print(Text(told, style=style), soft_wrap=True)


def _machine(document: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for device in document["devices"]:
        yield device["type"], f"{device['count']} x {device['name']}"
    yield "threads", ", ".join(f"{name} {count}" for name, count in document["threads"].items())
    memory = document["shared_memory"]
    small = "; containers get more with a larger --shm-size" if memory["total"] < _SMALL_SHARED_MEMORY else ""
    yield "shared memory", f"{memory['free'] / 2**20:,.0f} of {memory['total'] / 2**20:,.0f} MiB free{small}"


def _offered(document: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for kind in KINDS:
        names = [one["name"] if one["available"] else f"{one['name']} (unavailable)" for one in document[kind]]
        yield kind.replace("_", " "), ", ".join(names) or "none installed"


def _availability(backend: dict[str, Any]) -> str:
    if backend["available"]:
        return "available" + (f": {backend['reason']}" if backend["reason"] else "")
    return f"unavailable: {backend['reason']}" + (f"; fix: {backend['fix']}" if backend["fix"] else "")


def _show_pairs(console: Console, title: str, pairs: Iterable[tuple[str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=False, min_width=len(title))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, told in pairs:
        # Text and not str: square brackets in somebody's words are no markup.
        table.add_row(Text(name), Text(told))
    console.print(table)

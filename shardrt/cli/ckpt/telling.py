"""Words and documents that several commands share."""

from __future__ import annotations

import json
from typing import Any

import click


def size_in_words(nbytes: int) -> str:
    """Bytes, for people.

    Example:
        >>> from shardrt.cli.ckpt.telling import size_in_words
        >>> size_in_words(7), size_in_words(1500), size_in_words(3 * 10**9)
        ('7 B', '1.5 kB', '3.0 GB')
    """
    value, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def counted(count: int, what: str) -> str:
    """A number of things.

    Example:
        >>> from shardrt.cli.ckpt.telling import counted
        >>> counted(1, "rank"), counted(2, "rank")
        ('1 rank', '2 ranks')
    """
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def tell_written(document: dict[str, Any], as_json: bool) -> None:
    """What was written from what, for programs or for people; each side with its number of ranks, where it has one."""
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    for arrow, side, ranks in (("from", "source", "source_ranks"), ("to  ", "path", "ranks")):
        count = document.get(ranks)
        click.echo(f"{arrow} {document[side]}" + (f" ({counted(count, 'rank')})" if count else ""))
    for note in document["notes"]:
        click.echo(f"Note: {note}")

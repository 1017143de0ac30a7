"""The bar that shows how far ranks have come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardrt.launch import OnEvent

Reading = Callable[[Any], tuple[str, int, str]]
"""From an event to what is going on, how many steps are done, and a note to show behind the bar."""


@contextmanager
def rank_progress(*, ranks: int, steps: int, read: Reading, quiet: bool) -> Iterator[OnEvent]:
    """A bar on standard error, moved by what the first rank reports; yields what :func:`launch_ranks` calls.

    Example:
        >>> from shardrt.cli.progress import rank_progress
        >>> with rank_progress(ranks=2, steps=9, read=lambda event: ("training", event, ""), quiet=True) as on_event:
        ...     on_event(0, 3)
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True) as bar:
        task = bar.add_task(f"starting {ranks_in_words(ranks)}", total=steps, note="")

        def on_event(rank: int, event: Any) -> None:
            if rank == 0:
                description, done, note = read(event)
                bar.update(task, description=description, completed=done, note=note)

        yield on_event


def ranks_in_words(count: int) -> str:
    """How many ranks, for people.

    Example:
        >>> from shardrt.cli.progress import ranks_in_words
        >>> ranks_in_words(1), ranks_in_words(2)
        ('1 rank', '2 ranks')
    """
    return f"{count} rank{'s' if count != 1 else ''}"

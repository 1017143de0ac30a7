"""A bar for long saves and loads, on the first rank, where somebody is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WORTH_SHOWING_BYTES = 64 * 2**20


def nothing(done: int) -> None:
    """Nobody is looking.

    Example:
        >>> from shardrt.checkpoint.progress import nothing
        >>> nothing(3)
    """


@contextmanager
def progress_bar(what: str, total: int, *, show: bool | None, rank: int = 0) -> Iterator[Callable[[int], None]]:
    """Yields what is told how many bytes more are done.

    ``show=None`` shows a bar where standard error is a terminal and there is enough to wait for.

    Example:
        >>> from shardrt.checkpoint.progress import progress_bar
        >>> with progress_bar("saving", 100, show=False) as advance:
        ...     advance(100)
    """
    if show is None:
        show = sys.stderr.isatty() and total >= _WORTH_SHOWING_BYTES
    if not show or rank != 0:
        yield nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)

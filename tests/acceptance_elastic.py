"""Prints what happened to a run that lost a rank, and then went on with fewer and with more ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shardrt.testing import RankPool
from tests.ranks.elastic_runs import LOSE_AT, PHASES, TOLERANCE, run_elastic

console = Console(width=150)


def elastic(pool: RankPool) -> bool:
    """Attempts, the steps they went on from and reached, and the difference from a run without interruption."""
    del pool  # torchrun starts its own ranks
    with tempfile.TemporaryDirectory() as folder:
        story = run_elastic(Path(folder))
    table = Table(
        title=f"torchrun --max-restarts 3, rank 1 killed once at step {LOSE_AT}; then other numbers of ranks",
        title_justify="left",
    )
    for heading in ("ranks", "restarts", "went on from step", "checkpoints committed", "reached step"):
        table.add_column(heading)
    good = story.difference <= TOLERANCE and len(story.attempts) == len(PHASES) + 1
    before = 0
    for attempt in story.attempts:
        good &= attempt.first == before
        before = attempt.committed[-1] if attempt.committed else attempt.first
        table.add_row(
            str(attempt.ranks),
            str(attempt.restarts),
            str(attempt.first),
            ", ".join(map(str, attempt.committed)),
            "interrupted" if attempt.ended is None else str(attempt.ended),
        )
    good &= before == PHASES[-1][1]
    console.print(table)
    console.print(
        f"largest difference of any parameter from one rank without interruption: {story.difference:.1e} (allowed "
        f"{TOLERANCE:g}); {story.seconds:.0f} s in all, four starts of torchrun's ranks and one alone",
        markup=False,
        highlight=False,
    )
    return good

"""Prints what the tests of kills, damage and hostile files assert, as tables.

Run it with ``python tasks.py accept kills`` and ``python tasks.py accept damage``.
"""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from shardrt.testing import RankPool
from tests.ranks.crashing import PHASES
from tests.ranks.kill_series import choose_points, references, run_kills

console = Console(width=150)


def kills(pool: RankPool, points: int = 200, seed: int = 0, at_once: int = 10) -> bool:
    """End a rank by SIGKILL at seeded points; the next start must find the old checkpoint or the new one, and go on."""
    reference = references(pool)
    series = choose_points(reference, points, seed)
    columns = (TextColumn("killing ranks"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=points)
        verdicts = run_kills(pool, series, reference, at_once=at_once, done=lambda verdict: bar.advance(task))
    count = Counter((verdict.kill.point.phase, verdict.found) for verdict in verdicts)
    table = Table(
        title=f"SIGKILL at {len(verdicts)} points, seed {seed}: what the next start found", title_justify="left"
    )
    for heading in ("phase", "points", "of first rank", "asynchronous", "no checkpoint yet", "old", "new", "wrong"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for phase in PHASES:
        mine = [verdict for verdict in verdicts if verdict.kill.point.phase == phase]
        table.add_row(
            phase,
            str(len(mine)),
            str(sum(verdict.kill.victim == 0 for verdict in mine)),
            str(sum(verdict.kill.asynchronous for verdict in mine)),
            *(str(count[phase, outcome]) for outcome in ("none", "old", "new")),
            str(sum(bool(verdict.problems) for verdict in mine)),
        )
    console.print(table)
    wrong = [verdict for verdict in verdicts if verdict.problems]
    for verdict in wrong:
        console.print(f"WRONG: {verdict.kill}: {'; '.join(verdict.problems)}", markup=False, highlight=False)
    return len(verdicts) == points and not wrong

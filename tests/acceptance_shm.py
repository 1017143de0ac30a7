"""Prints what the tests of shared memory assert: starts in which a rank is killed, and who is let in.

Run it with ``python tasks.py accept shm``.
"""

from __future__ import annotations

import os
from collections import Counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from shardrt.testing import RankPool
from tests.ranks import shm_losses

console = Console(width=150)


def kills(pool: RankPool, starts: int = 100) -> bool:
    """A random rank of three is killed at a random moment of each start: the others raise, and nothing is left."""
    before = shm_losses.leftovers()
    wrong: list[str] = []
    phases: Counter[tuple[str, str]] = Counter()
    slowest: dict[str, float] = {}
    columns = (TextColumn("killing ranks"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        for seed in bar.track(range(starts)):
            victim, outcomes = shm_losses.kill_one(pool, seed)
            problem = shm_losses.verdict(victim, outcomes)
            wrong += [f"start {seed}: {problem}"] if problem else []
            for outcome in outcomes:
                if outcome.ok:
                    phase = outcome.value["phase"]
                    phases[phase, outcome.value["error"].partition(":")[0]] += 1
                    slowest[phase] = max(slowest.get(phase, 0.0), outcome.value["seconds"])
    left = shm_losses.leftovers() - before
    title = f"{starts} starts of 3 ranks over shm, one killed each time (timeout {shm_losses.TIMEOUT:g} s)"
    table = Table(title=title, title_justify="left")
    for heading in ("survivors killed from under", "error", "how many", "slowest after the kill"):
        table.add_column(heading)
    for (phase, error), count in sorted(phases.items()):
        table.add_row(phase, error, str(count), f"{slowest[phase]:.1f} s")
    console.print(table)
    for line in (*wrong, *(f"left behind: {name}" for name in sorted(left))):
        console.print(line, style="red", markup=False)
    console.print(f"hangs and wrong ends: {len(wrong)}; files left behind: {len(left)}")
    return not wrong and not left


def permissions(pool: RankPool) -> bool:
    """The mode of the memory's file, and what another user gets."""
    if os.geteuid() != 0:
        console.print("permissions: only root can become another user to try; left out")
        return True
    [found] = pool.run(shm_losses.permissions, ranks=1, init=None)
    console.print("the memory's file: " + ", ".join(f"{name}: {value}" for name, value in found.items()), markup=False)
    return bool(found["mode"] == "0o600" and found["other user"] == "PermissionError")

"""Prints what the tests of uneven inputs assert, as tables: equality with the documented average, and failures."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from shardrt.testing import RankPool
from tests.ranks.test_join_failures import TIMEOUT, breaks
from tests.ranks.uneven import BATCHES, SCHEDULES, WAYS, train

console = Console(width=170)
_POLICIES = ("active", "all", "shortest")


def uneven(pool: RankPool) -> bool:
    """Four ranks with 3, 7, 7 and 11 batches under every schedule and policy, and with one rank that raises."""
    equal = _equality(pool)
    return _failures(pool) and equal


def _equality(pool: RankPool) -> bool:
    table = Table(
        title=f"AdamW on 4 ranks with {', '.join(map(str, BATCHES))} batches: updates made, and the largest difference "
        "of any parameter on any rank from a twin that averages as documented",
        title_justify="left",
    )
    for heading in ("schedule", "module", *(f"policy {policy}" for policy in _POLICIES)):
        table.add_column(heading)
    good = True
    for schedule in SCHEDULES:
        for way in WAYS:
            cells = []
            for policy in _POLICIES:
                found = pool.run(train, ranks=4, timeout=120, schedule=schedule, way=way, policy=policy)
                worst, steps = max(one["difference"] for one in found), {one["steps"] for one in found}
                good &= worst == 0 and steps == {min(BATCHES) if policy == "shortest" else max(BATCHES)}
                good &= all(one["moved"] > 0.001 for one in found)
                bits = "0, bit for bit" if worst == 0 else f"{worst:.1e}"
                cells.append(f"{', '.join(map(str, sorted(steps)))} updates, {bits}")
            table.add_row(schedule, way, *cells)
    console.print(table)
    return good


def _failures(pool: RankPool) -> bool:
    good = True
    for rank, step, when in ((1, 2, "while all are active"), (3, 9, "while the others have run out")):
        for schedule in SCHEDULES:
            for way in WAYS:
                started = time.monotonic()
                arguments = {"schedule": schedule, "way": way, "rank": rank, "step": step}
                outcomes = pool.outcomes(breaks, ranks=4, timeout=3 * TIMEOUT, **arguments)
                took = time.monotonic() - started
                named = [f"rank {rank} failed" in one.error_message for one in outcomes if one.rank != rank]
                good &= all(named) and outcomes[rank].error_type == "ValueError" and took < TIMEOUT
                console.print(
                    f"{schedule}, {way}, rank {rank} raises {when}: all ended after {took:.1f} s "
                    f"(timeout {TIMEOUT} s), {sum(named)} of {len(named)} others name it",
                    style="bold",
                )
                for outcome in outcomes:
                    console.print(f"  rank {outcome.rank}: {outcome.describe()}"[:200], markup=False, highlight=False)
    return good

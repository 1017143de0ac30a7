"""Prints what the tests of overlap assert, as tables: equality, combinations, lost ranks, storms.

Run it with ``python tasks.py accept overlap`` and ``python tasks.py accept storm``.
"""

from __future__ import annotations

import time
from collections import Counter

from rich.console import Console
from rich.table import Table

from shardrt.testing import RankPool
from tests.ranks.combinations import FEATURES, SCHEDULES, TOLERANCE, all_combinations, run_combination
from tests.ranks.test_overlap import TOLERANCE as SUMMING_TOLERANCE
from tests.ranks.test_overlap import breaks_in_backward, storm, train

console = Console(width=170)
_STORM_SEEDS, _STORM_STEPS = 20, 200


def equality(pool: RankPool) -> bool:
    """Every schedule beside DDP, after the first step and after fifty."""
    table = Table(
        title="AdamW in two groups under a cosine schedule: largest difference from DDP with the plain optimizer",
        title_justify="left",
    )
    for heading in ("schedule", "module", *(f"{n} ranks, step {at}" for n in (2, 3, 4) for at in (1, 50))):
        table.add_column(heading)
    good = True
    for schedule in SCHEDULES:
        for way in ("plain", "ddp"):
            cells = []
            for world_size in (2, 3, 4):
                found = pool.run(train, ranks=world_size, timeout=120, schedule=schedule, way=way)
                for worst in (max(first for first, _ in found), max(last for _, last in found)):
                    good &= worst <= (0.0 if world_size == 2 else SUMMING_TOLERANCE)
                    cells.append("0, bit for bit" if worst == 0 else f"{worst:.1e}")
            table.add_row(schedule, way, *cells)
    console.print(table)
    return good


def combinations(pool: RankPool) -> bool:
    """Every subset of the features under every schedule, attached to DDP and on the plain module."""
    good = True
    for way in ("ddp", "plain"):
        table = Table(
            title=f"2 ranks, {way}: largest difference from DDP with the plain optimizer, for every combination of "
            f"{', '.join(FEATURES)}",
            title_justify="left",
        )
        for heading in ("combination", *SCHEDULES):
            table.add_column(heading, overflow="fold")
        refusals: dict[str, None] = {}
        count: Counter[str] = Counter()
        for features in all_combinations():
            cells = []
            for schedule in SCHEDULES:
                outcomes = pool.outcomes(
                    run_combination, ranks=2, timeout=120, schedule=schedule, features=list(features), way=way
                )
                errors = [outcome.error_message for outcome in outcomes if not outcome.ok]
                if errors:
                    good, cell, kind = False, f"ERROR {errors[0][:80]}", "errors"
                elif "refused" in outcomes[0].value:
                    good &= schedule == "interleaved" and all("refused" in outcome.value for outcome in outcomes)
                    refusals.setdefault(outcomes[0].value["refused"])
                    cell, kind = "refused", "refused"
                else:
                    worst = max(outcome.value["difference"] for outcome in outcomes)
                    good &= worst <= TOLERANCE
                    cell, kind = ("0", "bit for bit") if worst == 0 else (f"{worst:.1e}", "within tolerance")
                count[kind] += 1
                cells.append(cell)
            table.add_row(" + ".join(features) or "nothing of these", *cells)
        console.print(table)
        console.print(f"{way}: {dict(count)}, tolerance {TOLERANCE:g}", style="bold")
        for refusal in refusals:
            console.print("  refused when attached:", refusal, markup=False, highlight=False)
    return good


def lost_inside_backward(pool: RankPool) -> bool:
    """One of three ranks raises inside backward, or is killed there; the timeout is 20 s."""
    good = True
    for how in ("raised", "killed"):
        for schedule in SCHEDULES:
            for way in ("plain", "ddp"):
                if how == "raised" and schedule == "sync":
                    continue  # nothing is under way then: the next iteration works
                started = time.monotonic()
                outcomes = pool.outcomes(breaks_in_backward, ranks=3, timeout=60, schedule=schedule, way=way, how=how)
                took = time.monotonic() - started
                named = all("rank 1" in outcomes[rank].error_message for rank in (0, 2))
                good &= named and took < 40
                console.print(
                    f"{schedule}, {way}, rank 1 {how} in backward: all ended after {took:.1f} s", style="bold"
                )
                for outcome in outcomes:
                    console.print(f"  rank {outcome.rank}: {outcome.describe()}"[:400], markup=False, highlight=False)
    return good


def storms(pool: RankPool) -> bool:
    """Random sleeps in forward, hooks and threads of four ranks."""
    good = True
    for schedule in SCHEDULES:
        naps: Counter[str] = Counter()
        started, diverged, failed = time.monotonic(), [], []
        for seed in range(_STORM_SEEDS):
            way = ("plain", "ddp")[seed % 2]
            outcomes = pool.outcomes(
                storm, ranks=4, timeout=400, schedule=schedule, way=way, weather=seed, steps=_STORM_STEPS
            )
            if not all(outcome.ok for outcome in outcomes):
                failed.append(f"{seed}: {outcomes[0].describe()[:200]}")
                continue
            for outcome in outcomes:
                naps.update(outcome.value["naps"])
                if outcome.value["sums"] != outcomes[0].value["sums"]:
                    diverged.append(seed)
        good &= not diverged and not failed
        console.print(
            f"{schedule}: seeds 0 to {_STORM_SEEDS - 1} (even: plain, odd: DDP), {_STORM_STEPS} steps each, "
            f"sleeps {dict(naps)}, {time.monotonic() - started:.0f} s; hangs or errors: {failed or 'none'}, "
            f"diverged: {diverged or 'none'}",
            markup=False,
        )
    return good

"""Prints what the tests of sharded modules assert, as tables: every strategy beside the unsharded twin.

Run it with ``python tasks.py accept strategies``.
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from shardrt.testing import Outcome, RankPool
from tests.ranks.sharded_twins import EVERY_STRATEGY, compare_ways, options_of, tolerance
from tests.ranks.zoo import ZOO

console = Console(width=170)
OPTIMIZERS = ("adamw_foreach", "sgd_momentum", "muon")
_SECONDS = 240


def strategies(pool: RankPool) -> bool:
    """Every strategy, model, optimizer and number of ranks."""
    table = Table(
        title="Largest difference of any parameter from the unsharded twin after 30 steps, over all ranks and "
        "AdamW, SGD with momentum and Muon",
        title_justify="left",
    )
    for heading in ("model", "ranks", *EVERY_STRATEGY, "met"):
        table.add_column(heading)
    good, started, cells = True, time.monotonic(), 0
    for name in ZOO:
        for world_size in (2, 3, 4):
            ways = {each: options_of(each, world_size) for each in EVERY_STRATEGY}
            worst = dict.fromkeys(EVERY_STRATEGY, 0.0)
            allowed = {each: max(tolerance(name, each, one) for one in OPTIMIZERS) for each in EVERY_STRATEGY}
            failed: dict[str, str] = {}
            for optimizer in OPTIMIZERS:
                if name == "scalars" and optimizer == "muon":
                    continue  # it takes matrices, and there is none
                for each, outcomes in _outcomes(pool, name, ways, optimizer, world_size).items():
                    cells += 1
                    if not all(outcome.ok for outcome in outcomes):
                        failed[each] = f"{optimizer}: {outcomes[0].describe()}"
                        continue
                    found = max(outcome.value[each]["difference"] for outcome in outcomes)
                    worst[each] = max(worst[each], found)
                    moved = min(outcome.value[each]["moved"] for outcome in outcomes)
                    if found > tolerance(name, each, optimizer) or moved < 1e-3:
                        failed.setdefault(each, f"{optimizer}: {found:.1e}, moved {moved:.1e}")
            good &= not failed
            table.add_row(
                name,
                str(world_size),
                *(failed.get(each) or shown(worst[each], allowed[each]) for each in EVERY_STRATEGY),
                "NO" if failed else "yes",
            )
    console.print(table)
    console.print(
        f"{cells} runs in {time.monotonic() - started:.0f} s. Tolerance: none, bit for bit, except where it is shown. "
        "The twin adds gradients in the strategy's order.\nFor Muon everything but matrices is frozen. Hybrid groups "
        "have 2 ranks of 4; of 2 and 3 ranks, one rank or all.",
        style="dim",
    )
    return good


def shown(worst: float, allowed: float) -> str:
    """A difference and, where there is one, its tolerance."""
    return ("0" if worst == 0 else f"{worst:.1e}") + (f" of {allowed:.1e}" if allowed else "")


def _outcomes(
    pool: RankPool, name: str, ways: dict[str, dict[str, object]], optimizer: str, world_size: int
) -> dict[str, list[Outcome]]:
    """By strategy: all in one call, for which the twin is trained once; each alone if that fails."""

    def run(some: dict[str, dict[str, object]]) -> list[Outcome]:
        return pool.outcomes(
            compare_ways, ranks=world_size, timeout=_SECONDS, name=name, ways=some, optimizer=optimizer
        )

    together = run(ways)
    if all(outcome.ok for outcome in together):
        return dict.fromkeys(ways, together)
    return {each: run({each: options}) for each, options in ways.items()}

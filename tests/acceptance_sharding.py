"""Prints what the tests of sharded modules assert, as tables: every strategy beside the unsharded twin, Hugging Face
models too, and checkpoints that go from every strategy to every other.

Run it with ``python tasks.py accept strategies``, ``huggingface`` and ``between``.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from shardrt.testing import Outcome, RankPool
from tests.ranks.huggingface import CHECKPOINTING, MODELS, compare_language_models
from tests.ranks.sharded_twins import EVERY_STRATEGY, compare_ways, options_of, tolerance
from tests.ranks.strategy_checkpoints import load_under, save_under
from tests.ranks.zoo import ZOO

console = Console(width=170)
OPTIMIZERS = ("adamw_foreach", "sgd_momentum", "muon")
Ways = dict[str, dict[str, Any]]
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

                def run(some: Ways) -> list[Outcome]:
                    return pool.outcomes(
                        compare_ways,
                        ranks=world_size,  # noqa: B023
                        timeout=_SECONDS,
                        name=name,  # noqa: B023
                        ways=some,
                        optimizer=optimizer,  # noqa: B023
                    )

                for each, outcomes in _each(run, ways).items():
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


def huggingface(pool: RankPool) -> bool:
    """Every strategy on models of Hugging Face Transformers; 2 ranks, and 4 in groups of 2 for the hybrid ones."""
    table = Table(
        title="Hugging Face models, AdamW: largest difference of any parameter from the unsharded twin after 30 steps",
        title_justify="left",
    )
    for heading in ("model", "embeddings", "activation checkpointing", *EVERY_STRATEGY, "met"):
        table.add_column(heading)
    good, refusals, started = True, dict[str, None](), time.monotonic()
    hybrid = [each for each in EVERY_STRATEGY if each.startswith("hybrid")]
    plain = [each for each in EVERY_STRATEGY if each not in hybrid]
    for name, checkpointing, tied in itertools.product(MODELS, CHECKPOINTING, (True, False)):
        cells = {}
        for some, world_size in ((plain, 2), (hybrid, 4)):

            def run(ways: Ways, size: int = world_size) -> list[Outcome]:
                return pool.outcomes(
                    compare_language_models,
                    ranks=size,
                    timeout=_SECONDS,
                    name=name,  # noqa: B023
                    tied=tied,  # noqa: B023
                    checkpointing=checkpointing,  # noqa: B023
                    ways=ways,
                )

            for each, outcomes in _each(run, {each: options_of(each, world_size) for each in some}).items():
                cells[each] = _language_model_cell(each, outcomes, refusals)
        met = all(cell == "0" for cell in cells.values())
        good &= met
        table.add_row(
            name,
            "tied" if tied else "not tied",
            checkpointing,
            *(cells[each] for each in EVERY_STRATEGY),
            "yes" if met else "NO",
        )
    console.print(table)
    console.print(f"{time.monotonic() - started:.0f} s. Tolerance: none, bit for bit, losses too.", style="dim")
    for refusal in refusals:
        console.print(refusal, markup=False, highlight=False)
    return good


def _language_model_cell(each: str, outcomes: list[Outcome], refusals: dict[str, None]) -> str:
    errors = [outcome for outcome in outcomes if not outcome.ok]
    if errors:
        refusals.setdefault(errors[0].describe())
        return str(errors[0].error_type)
    values = [outcome.value[each] for outcome in outcomes]
    if min(value["moved"] for value in values) < 1e-3 or not all(value["same_keys"] for value in values):
        return "not trained, or other names"
    return shown(max(max(value["difference"], value["loss"]) for value in values), 0.0)


_MODELS_BETWEEN = {"tied transformer": "adamw_foreach", "mixed dtypes": "sgd_momentum", "odd": "muon"}
_OTHER_SIZES = ((4, 4), (4, 2), (4, 3), (3, 4), (2, 4))


def between(pool: RankPool) -> bool:
    """Checkpoints from every strategy to every other, on as many ranks and on fewer or more."""
    good = True
    for size, other_size in _OTHER_SIZES:
        table = Table(
            title=f"Saved on {size} ranks (rows), loaded on {other_size} (columns): whole state of model and optimizer",
            title_justify="left",
        )
        for heading in ("saved under", *EVERY_STRATEGY):
            table.add_column(heading)
        for saved in EVERY_STRATEGY:
            wrong: dict[str, list[str]] = {each: [] for each in EVERY_STRATEGY}
            for name, optimizer in _MODELS_BETWEEN.items():
                for loaded, what in _moved(pool, name, optimizer, saved, size, other_size).items():
                    wrong[loaded] += [f"{name}: {what}"] if what else []
            good &= not any(wrong.values())
            table.add_row(saved, *("; ".join(wrong[each]) or "bit for bit" for each in EVERY_STRATEGY))
        console.print(table)
    models = ", ".join(f"{name} ({optimizer})" for name, optimizer in _MODELS_BETWEEN.items())
    console.print(f"Each cell is {len(_MODELS_BETWEEN)} models, 3 steps trained: {models}", style="dim")
    return good


def _moved(pool: RankPool, name: str, optimizer: str, saved: str, size: int, other_size: int) -> dict[str, str]:
    """By the strategy that loads: what is not the same afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        given = {"path": directory, "name": name, "optimizer": optimizer, "timeout": _SECONDS}
        kept = pool.outcomes(save_under, ranks=size, options=options_of(saved, size), **given)
        if not all(outcome.ok and outcome.value for outcome in kept):
            return dict.fromkeys(EVERY_STRATEGY, f"not saved: {kept[0].describe()}")
        ways = {each: options_of(each, other_size) for each in EVERY_STRATEGY}
        found = _each(lambda some: pool.outcomes(load_under, ranks=other_size, ways=some, **given), ways)
        return {
            each: " ".join(
                dict.fromkeys(outcome.value[each] if outcome.ok else outcome.describe() for outcome in found[each])
            )
            for each in EVERY_STRATEGY
        }


def shown(worst: float, allowed: float) -> str:
    """A difference and, where there is one, its tolerance."""
    return ("0" if worst == 0 else f"{worst:.1e}") + (f" of {allowed:.1e}" if allowed else "")


def _each(run: Callable[[Ways], list[Outcome]], ways: Ways) -> dict[str, list[Outcome]]:
    """By strategy: all in one call, for which the twin is trained once; each alone if that fails."""
    together = run(ways)
    if all(outcome.ok for outcome in together):
        return dict.fromkeys(ways, together)
    return {each: run({each: options}) for each, options in ways.items()}

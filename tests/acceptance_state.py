"""Prints what the tests of kept state assert, as tables: runs that go on with other ranks, round trips with torch."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

import shardrt
from shardrt.testing import RankPool
from tests.ranks.keeping import Run, difference, save_run
from tests.ranks.test_checkpoints import TOLERANCE
from tests.ranks.test_optimizer_equals_twin import PARTITIONERS
from tests.ranks.test_state_dicts import from_torch_zero, round_trip
from tests.ranks.twins import ELEMENTWISE, OPTIMIZERS

console = Console(width=150)
SCHEDULES = ("sync", "bucket", "interleaved", "priority")
WORLDS = (1, 2, 3, 4, 5)
STEPS = 5


def cells() -> list[dict[str, Any]]:
    """For every pair of world sizes, every pair of partitioners once and every pair of schedules once."""
    found = []
    for before in WORLDS:
        for after in WORLDS:
            for number in range(16):
                turned = (number * 5 + before * 3 + after) % 16  # 5 and 16 share no factor: a permutation
                found.append(
                    {
                        "save": [before, list(PARTITIONERS)[number // 4], SCHEDULES[turned // 4]],
                        "load": [after, list(PARTITIONERS)[number % 4], SCHEDULES[turned % 4]],
                    }
                )
    return found


def runtime(partitioner: str, schedule: str) -> dict[str, Any]:
    return {"partitioner": PARTITIONERS[partitioner], "schedule": schedule, "bucket_mb": 0.001}


def load_many(paths: list[str], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Load one checkpoint after the other into one run, and train on from each."""
    found = []
    with shardrt.Runtime(timeout=30, **options) as rt:
        run = Run(rt)
        for path in paths:
            run.load(path)
            loaded = run.digests()
            run.train(STEPS, STEPS + 20)
            found.append({"loaded": loaded, "final": run.digests(), "parameters": run.parameters()})
    return found


def reshard(pool: RankPool) -> bool:
    """Save at N, load at M."""
    wanted = cells()
    results: dict[tuple[int, int], list[tuple[bool, bool, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        saved: dict[str, Any] = {}
        for save in track(_distinct(cell["save"] for cell in wanted), "saving", console=Console(stderr=True)):
            path = str(Path(folder) / "-".join(map(str, save)))
            call = {"path": path, "steps": STEPS, "optimizer": "adamw_foreach"}
            saved[path] = pool.run(save_run, ranks=save[0], timeout=120, runtime=runtime(*save[1:]), **call)[0]
        for load in track(_distinct(cell["load"] for cell in wanted), "loading", console=Console(stderr=True)):
            of_load = [cell["save"] for cell in wanted if cell["load"] == load]
            paths = [str(Path(folder) / "-".join(map(str, save))) for save in of_load]
            every = pool.run(load_many, ranks=load[0], timeout=300, paths=paths, options=runtime(*load[1:]))
            for index, (save, path) in enumerate(zip(of_load, paths, strict=True)):
                for rank in every:
                    got, expected = rank[index], saved[path]
                    results.setdefault((save[0], load[0]), []).append(
                        (
                            got["loaded"] == expected["saved"],
                            got["final"] == expected["final"],
                            difference(got["parameters"], expected["parameters"]),
                        )
                    )
    table = Table(
        title=f"Saved by N ranks, loaded by M: {len(wanted)} cells (for each N and M every pair of partitioners and "
        "every pair of schedules), consolidated state bit-equal; then the largest difference after 20 more steps",
        title_justify="left",
    )
    for heading in ("N \\ M", *map(str, WORLDS)):
        table.add_column(heading)
    good = True
    for before in WORLDS:
        row = []
        for after in WORLDS:
            rows = results[before, after]
            equal = sum(one[0] for one in rows)
            worst = max(one[2] for one in rows)
            exact = all(one[1] for one in rows)
            good &= equal == len(rows) and worst <= TOLERANCE and (exact or before != after)
            row.append(f"{equal}/{len(rows)} equal, {'0, bit for bit' if exact else f'{worst:.1e}'}")
        table.add_row(str(before), *row)
    console.print(table)
    console.print(f"stated tolerance at N != M: {TOLERANCE:g}; at N = M: bit for bit")
    return good


def _distinct(items: Any) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if item not in found:
            found.append(item)
    return found


def torch_round_trips(pool: RankPool) -> bool:
    """State dicts to plain torch.optim and back, and torch's own ZeRO's."""
    table = Table(title="Whole state dicts, ours to torch and torch's to ours, then 3 steps", title_justify="left")
    for heading in (
        "optimizer",
        "ranks",
        "partitioner",
        "state equals torch's",
        "caller's dict untouched",
        "difference",
    ):
        table.add_column(heading)
    good = True
    for optimizer in OPTIMIZERS:
        for world_size, partitioner in ((1, "greedy"), (2, "flat"), (2, "greedy"), (3, "greedy"), (4, "bucket")):
            if partitioner in ("flat", "bucket") and optimizer not in ELEMENTWISE:
                continue
            call = {"optimizer": optimizer, "partitioner": partitioner}
            found = pool.run(round_trip, ranks=world_size, **call)
            worst = max(one["difference"] for one in found)
            equal, kept = all(one["equal"] for one in found), all(one["untouched"] for one in found)
            good &= kept and worst <= (0.0 if world_size <= 2 else 2e-6) and (equal or world_size > 2)
            told = "bit for bit" if equal else "to rounding" if world_size > 2 else "NO"
            table.add_row(optimizer, str(world_size), partitioner, told, "yes" if kept else "NO", f"{worst:.1e}")
    console.print(table)
    found = pool.run(from_torch_zero, ranks=2)
    console.print(f"torch's ZeroRedundancyOptimizer's dict to ours and back, 3 steps each: {found}", markup=False)
    return good and all(one["difference"] == 0.0 for one in found)

"""Prints what a step allocates after warm-up beyond what the unsharded twin does, and which lines of ours ask for it.

Run it with ``python tasks.py accept allocations``. Every byte that torch's allocator hands out during a step is
counted, whatever the thread, for a transformer of some layers and for one of twice as many: what grows between the two
grows with the model. The twin trains the same model alone with the bare optimizer, whose own needs in an update count
for the part of the parameters that a rank has.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import shardrt
from shardrt.bench.allocations import counted_allocations
from shardrt.demo.model import ByteTransformer
from shardrt.testing import RankPool
from tests.allocation_lines import TRAINER, watched_lines

RANKS = 2
WIDTH = 128
LAYERS = (2, 4)
WARM_UP = 6
STEPS = 5
OPTIMIZER = "rt.optimizer"
SCHEDULES = ("sync", "bucket", "interleaved", "priority")
STRATEGIES = ("no_shard", "shard_optim", "shard_grad_op", "full_shard")
BACKENDS = ("gloo", "shm")
Way = tuple[str, str, str]
"""What is trained with, its schedule and its backend."""
LIMIT = 0.01
"""Of the model's own growth: what is allocated for each parameter's name or bit is no tensor of its size."""

_BARE_OPTIMIZER = "shardrt/optim/local.py"

console = Console(width=170)


def train(*, layers: int, way: str, schedule: str, backend: str, watch: bool) -> dict[str, Any]:
    """Bytes that a step allocates on this rank, by phase; or, watched, by line."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: torch.nn.Module = ByteTransformer(width=WIDTH, layers=layers, heads=4, context=8)
    sizes = [param.nbytes for param in model.parameters()]
    batch = torch.zeros(1, 9, dtype=torch.long)
    settle: Callable[[], None] = lambda: None  # noqa: E731
    with ExitStack() as cleanup:
        if way == "twin":
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        else:
            rt = cleanup.enter_context(
                shardrt.Runtime(backend=backend, schedule=schedule, partitioner="bucket", bucket_mb=0.5, timeout=120)
            )
            if way == OPTIMIZER:
                optimizer = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3)
            else:
                model, optimizer = rt.shard(model, torch.optim.AdamW, lr=1e-3, strategy=way)
            settle = optimizer.finish

        def step(note: Callable[[str], None]) -> None:
            loss = model(batch)
            note("forward")
            loss.backward()
            note("backward")
            optimizer.step()
            optimizer.zero_grad()
            settle()
            note("step")

        for _ in range(WARM_UP):
            step(lambda phase: None)
        gc.collect()
        if watch:
            with watched_lines() as lines:
                for _ in range(STEPS):
                    step(lambda phase: None)
            found: dict[str, Any] = {line: nbytes / STEPS for line, nbytes in lines.bytes.most_common()}
        else:
            found = _count_phases(step)
    return {"found": found, "model": sum(sizes)}


def _count_phases(step: Callable[[Callable[[str], None]], None]) -> dict[str, float]:
    """The median step: memory that is kept is taken when it is first needed, and how many operations are under way at
    once is a matter of time."""
    found: dict[str, list[int]] = {}
    with counted_allocations() as counted:
        before = counted.total

        def note(phase: str) -> None:
            nonlocal before
            now = counted.total
            found.setdefault(phase, []).append(now - before)
            before = now

        for _ in range(STEPS):
            step(note)
    return {phase: statistics.median(counts) for phase, counts in found.items()}


def allocations(pool: RankPool) -> bool:
    """None that grow with the model."""
    each = [*((OPTIMIZER, schedule) for schedule in SCHEDULES), *((strategy, "sync") for strategy in STRATEGIES)]
    ways = [(*one, backend) for backend in BACKENDS for one in each]
    twins = {layers: _fullest(pool, layers, ("twin", "sync", "gloo"), ranks=1) for layers in LAYERS}
    growth = twins[LAYERS[1]]["model"] - twins[LAYERS[0]]["model"]
    table = Table(
        title=f"Bytes allocated in a step after warm-up, {RANKS} ranks, {LAYERS[0]} and {LAYERS[1]} layers of "
        f"{growth / (LAYERS[1] - LAYERS[0]):,.0f} bytes: in all, and beyond the unsharded twin",
        title_justify="left",
    )
    for heading in ("", "schedule", "backend", *(f"{n} layers" for n in LAYERS), *(f"beyond, {n}" for n in LAYERS)):
        table.add_column(heading, justify="left" if heading in ("", "schedule", "backend") else "right")
    table.add_column("grows, in models", justify="right")
    table.add_column("by gathering", justify="right")
    table.add_column("none that grow")
    good = True
    culprits = []
    for way in ways:
        runs = {layers: _fullest(pool, layers, way, ranks=RANKS) for layers in LAYERS}
        totals = [sum(runs[layers]["found"].values()) for layers in LAYERS]
        share = 1.0 if way[0] == "no_shard" else 1 / RANKS
        beyond = [total - _due(twins[layers]["found"], share) for total, layers in zip(totals, LAYERS, strict=True)]
        grown = (beyond[1] - beyond[0]) / growth
        gathered = _gathered(pool, way) / growth if way[0] == "full_shard" else 0.0
        none = grown - gathered <= LIMIT
        good &= none
        table.add_row(
            *way,
            *(f"{value:,.0f}" for value in (*totals, *beyond)),
            f"{grown:.3f}",
            f"{gathered:.3f}" if gathered else "",
            ("all but gathers" if gathered > LIMIT else "yes") if none else "NO",
        )
        if not none:
            culprits.append(way)
    console.print(table)
    for way in culprits:
        _show_lines(pool, way, growth)
    return good


def _gathered(pool: RankPool, way: Way) -> float:
    """How much more memory a larger model's whole parameters are given as they come, which they give back as they go:
    that is what this strategy is. To keep it would be to keep the parameters. Views take none."""
    few, many = (_fullest(pool, n, way, ranks=RANKS, watch=True)["found"] for n in LAYERS)
    coming = [sum(nbytes for line, nbytes in found.items() if line.endswith(" resize_")) for found in (few, many)]
    return coming[1] - coming[0]


def _due(twin: dict[str, float], share: float) -> float:
    """What the trainer itself allocates, and the bare optimizer for the share of the parameters that a rank updates."""
    return twin["forward"] + twin["backward"] + share * twin["step"]


def _fullest(pool: RankPool, layers: int, way: Way, *, ranks: int, watch: bool = False) -> dict[str, Any]:
    answers = pool.run(
        "tests.acceptance_allocations:train",
        ranks=ranks,
        timeout=180,
        layers=layers,
        way=way[0],
        schedule=way[1],
        backend=way[2],
        watch=watch,
    )
    return max(answers, key=lambda answer: sum(answer["found"].values()))


def _show_lines(pool: RankPool, way: Way, growth: float) -> None:
    """Lines whose bytes grow with the model, beyond those of the trainer and of the bare optimizer."""
    few, many = (_fullest(pool, n, way, ranks=RANKS, watch=True)["found"] for n in LAYERS)
    console.print(f"{', '.join(way)}: lines that allocate more for a larger model, in models per step", style="bold")
    for line, nbytes in many.items():
        grown = (nbytes - few.get(line, 0.0)) / growth
        if grown > LIMIT and TRAINER not in line and _BARE_OPTIMIZER not in line:
            console.print(f"  {grown:6.3f}  {line}", highlight=False, markup=False)

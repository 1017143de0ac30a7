"""Prints what the tests of kills, damage and hostile files assert, as tables.

Run it with ``python tasks.py accept kills`` and ``python tasks.py accept damage``.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import shardrt
from shardrt.checkpoint.manifest import seal, unseal
from shardrt.testing import RankPool
from tests.ranks.crashing import PHASES
from tests.ranks.damaging import build, load_into, save_some, train_step, try_to_load
from tests.ranks.kill_series import choose_points, references, run_kills
from tests.ranks.test_checkpoint_damage import sweep
from tests.unit.test_checkpoint_hostile import FORGERIES

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
    failed = [verdict for verdict in verdicts if verdict.problems]
    for verdict in failed:
        console.print(f"WRONG: {verdict.kill}: {'; '.join(verdict.problems)}", markup=False, highlight=False)
    return len(verdicts) == points and not failed


def damage(pool: RankPool, places: int = 50, flips: int = 200) -> bool:
    """Cut every file of a checkpoint of two ranks, and flip bits of it: each time it must be refused by name."""
    with tempfile.TemporaryDirectory() as folder:
        pool.run(save_some, ranks=2, path=folder)
        found = sweep(Path(folder), places=places, flips=flips)
        earlier = [answer["step"] for answer in pool.run(try_to_load, ranks=2, path=folder, step=1)]
    table = Table(title="Damaged files, loaded alone and refused with file and tensor named", title_justify="left")
    for heading in ("file", "truncated", "bits flipped", "not as required"):
        table.add_column(heading)
    for name, wrong in found.items():
        table.add_row(name, str(places), str(flips), str(len(wrong)))
    console.print(table)
    console.print("latest.json: a damaged pointer is ignored, and the newest complete checkpoint is taken")
    console.print(f"the checkpoint before still loads on both ranks: {earlier == [0, 0]}")
    for wrong in found.values():
        for text in wrong[:5]:
            console.print(f"WRONG: {text}", markup=False, highlight=False)
    return earlier == [0, 0] and not any(found.values())


def hostile(pool: RankPool) -> bool:
    """Sealed manifests that lie, loaded alone: the error of each."""
    del pool
    table = Table(title="Forged manifests with a right checksum", title_justify="left")
    table.add_column("forgery")
    table.add_column("error", overflow="fold")
    good = True
    with tempfile.TemporaryDirectory() as folder, shardrt.Runtime() as rt:
        model, opt = build(rt)
        train_step(model, opt)
        rt.save(folder, model=model, optimizer=opt, extra={"step": 1})
        [manifest] = Path(folder).glob("save-*/manifest.json")
        whole = manifest.read_bytes()
        for case, (change, words) in FORGERIES.items():
            document = unseal(whole, where=str(manifest))
            change(document)
            manifest.write_bytes(seal(document))
            answer = load_into(rt, model, opt, folder)
            text = (answer["error"] or "accepted").replace(folder, "run")
            good &= answer["unchanged"] and words in text
            table.add_row(case, Text(text[:230]))
    console.print(table)
    return good

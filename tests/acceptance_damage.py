"""Prints what the tests of kills, damage and hostile files assert, as tables.

Run it with ``python tasks.py accept kills`` and ``python tasks.py accept damage``.
"""

from __future__ import annotations

import pickle
import shutil
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
from tests.ranks.damaging import (
    FAULTS,
    build,
    load_into,
    reachable_directory,
    save_on_a_bad_disk,
    save_some,
    train_step,
    try_to_load,
)
from tests.ranks.kill_series import choose_points, references, run_kills
from tests.ranks.test_checkpoint_damage import DAMAGES, sweep
from tests.unit.test_checkpoint_hostile import FORGERIES, Canary

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
    good = _canary_is_silent()
    table = Table(title="Forged manifests with a right checksum", title_justify="left")
    table.add_column("forgery")
    table.add_column("error", overflow="fold")
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


def _canary_is_silent() -> bool:
    """Pickles that would make a file, in place of each file of a checkpoint."""
    good = True
    with tempfile.TemporaryDirectory() as folder, shardrt.Runtime() as rt:
        model, opt = build(rt)
        train_step(model, opt)
        rt.save(folder, model=model, optimizer=opt, extra={"step": 1})
        canary = Path(folder) / "sang"
        data = pickle.dumps(Canary(canary))
        for file in [*Path(folder).glob("save-*/*"), Path(folder) / "latest.json"]:
            whole = file.read_bytes()
            file.write_bytes(data)
            answer = load_into(rt, model, opt, folder)
            file.write_bytes(whole)
            told = (answer["error"] or "the pointer is ignored").replace(folder, "run")
            console.print(f"pickle in place of {file.name}: {told[:150]}", markup=False, highlight=False)
            good &= file.name == "latest.json" or answer["error"] is not None
        sang = canary.exists()
        pickle.loads(data)
        console.print(f"the canary sang: {sang}; when it is unpickled on purpose it sings: {canary.exists()}")
        return good and not sang and canary.exists()


def misuse(pool: RankPool) -> bool:
    """What else can be wrong with a directory or a disk: the error of every rank, and that nothing old is lost."""
    table = Table(title="Two ranks; the error of each, and whether the old one still loads", title_justify="left")
    for heading in ("what", "errors", "old one loads"):
        table.add_column(heading, overflow="fold")
    good = True
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        pool.run(save_some, ranks=2, path=str(whole))
        for case, damage_it in DAMAGES.items():
            path = Path(folder) / case
            shutil.copytree(whole, path)
            old, new = sorted(path.glob("save-*"))
            damage_it(new, old)
            answers = pool.run(try_to_load, ranks=2, path=str(path))
            loads = [answer["step"] for answer in pool.run(try_to_load, ranks=2, path=str(old))] == [0, 0]
            good &= loads and all(answer["error"] and answer["unchanged"] for answer in answers)
            _add(table, case, [answer["error"] or "none" for answer in answers], loads, folder)
        empty = Path(folder) / "empty"
        empty.mkdir()
        answers = pool.run(try_to_load, ranks=2, path=str(empty))
        good &= all("NoCheckpointError" in (answer["error"] or "") for answer in answers)
        _add(table, "empty directory", [answer["error"] or "none" for answer in answers], None, folder)
        for fault in FAULTS:
            culprit = 0 if fault.endswith(".json") or fault in ("read only", "full by fsspec") else 1
            with reachable_directory() as place:
                answers = pool.run(
                    save_on_a_bad_disk, ranks=2, path=place, fault=fault, asynchronous=False, culprit=culprit
                )
            loads = all((answer["old"], answer["new"]) == (1, 3) for answer in answers)
            good &= loads and all(answer["told"] for answer in answers)
            _add(table, f"saving: {fault}", [answer["told"][0] for answer in answers], loads, folder)
    console.print(table)
    return good


def _add(table: Table, case: str, errors: list[str], loads: bool | None, folder: str) -> None:
    texts = list(dict.fromkeys(text.replace(folder, "")[:260] for text in errors))
    shown = "\n".join(f"- {text}" for text in texts)
    table.add_row(case, Text(shown), "" if loads is None else "yes" if loads else "NO")

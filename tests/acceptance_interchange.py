"""Prints what the tests of interchange assert, as tables: round trips, other numbers of ranks, files that mean harm."""

from __future__ import annotations

import pickle
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from shardrt.errors import CheckpointError
from shardrt.interchange import read_dcp, read_torch, write_dcp, write_torch
from shardrt.testing import RankPool
from tests.doubles.states import Canary, same, whole
from tests.ranks.fsdp_runs import LAYOUTS, consolidate_zero, leave_checkpoints, start_from
from tests.ranks.test_interchange_ranks import TOLERANCE, comparable, load, portable
from tests.ranks.twins import OPTIMIZERS, largest_difference
from tests.unit.test_interchange_memory import ALLOWED, ELEMENTS, TENSORS, write_and_read
from tests.unit.test_interchange_torch import trained

console = Console(width=150)


def round_trips(pool: RankPool) -> bool:
    """Everything below, each in a directory of its own."""
    good = True
    warnings.filterwarnings("ignore", module="torch.distributed")
    for section in (_torch_files, _zero, _fsdp, _memory, _harm):
        with tempfile.TemporaryDirectory() as directory:
            started = time.monotonic()
            good &= section(pool, Path(directory))
            console.print(f"{section.__name__.strip('_')}: {time.monotonic() - started:.1f} s", style="dim")
    return good


def _shown(equal: bool) -> str:
    return "bit for bit" if equal else "DIFFERS"


def _torch_files(pool: RankPool, root: Path) -> bool:
    table = Table(title="Three steps of each optimizer through other files and back", title_justify="left")
    for heading in ("optimizer", "torch files", "torch.distributed.checkpoint", "the same, flattened"):
        table.add_column(heading)
    good = True
    for name in OPTIMIZERS:
        model, optimizer = trained(name, named=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, root / f"{name}.pt")
        state = read_torch(root / f"{name}.pt")
        expected = comparable(whole(state))
        write_torch(state, root / f"{name}-m.pt", root / f"{name}-o.pt")
        write_dcp(state, root / f"{name}-nested")
        write_dcp(state, root / f"{name}-flat", flatten=True)
        found = [
            read_torch(root / f"{name}-m.pt", root / f"{name}-o.pt"),
            read_dcp(root / f"{name}-nested"),
            read_dcp(root / f"{name}-flat"),
        ]
        equal = [same(comparable(whole(each)), expected) for each in found]
        equal[0] &= same(dict(model.state_dict()), torch.load(root / f"{name}-m.pt", weights_only=True))
        good &= all(equal)
        table.add_row(name, *map(_shown, equal))
    console.print(table)
    return good


def _zero(pool: RankPool, root: Path) -> bool:
    table = Table(title="torch's ZeroRedundancyOptimizer, consolidated from 2 ranks", title_justify="left")
    for heading in ("optimizer", "state of", "read"):
        table.add_column(heading)
    good = True
    for optimizer in ("sgd_momentum", "adam", "adamw_fused", "adafactor", "lion_third_party"):
        pool.run(consolidate_zero, ranks=2, timeout=120, directory=str(root), optimizer=optimizer)
        then = load(root / "zero.pt")
        found = read_torch(root / "zero.pt", names=then["names"]).optimizers["optimizer"].state
        raw = then["optimizer"]["state"]
        equal = len(found) == len(raw) and all(
            same(whole(dict(found.get(name, {}))), raw.get(number, {})) for number, name in enumerate(then["names"])
        )
        good &= equal
        table.add_row(optimizer, f"{len(found)} parameters", _shown(equal))
    console.print(table)
    return good


def _fsdp(pool: RankPool, root: Path) -> bool:
    table = Table(
        title="FSDP2 saved on 2 ranks; exported, loaded by FSDP2, and three steps further beside the run that went on",
        title_justify="left",
    )
    for heading in ("optimizer", "layout", "read", "loaded on", "state", "three steps later"):
        table.add_column(heading)
    good = True
    for optimizer in ("adamw", "sgd"):
        home = root / optimizer
        home.mkdir()
        pool.run(leave_checkpoints, ranks=2, timeout=120, directory=str(home), optimizer=optimizer)
        then, later = portable(home / "then.pt"), portable(home / "later.pt")
        for layout in LAYOUTS:
            state = read_dcp(home / layout)
            read = same(comparable(whole(state)), then)
            for world_size in (1, 2, 3, 4):
                name = f"{layout}-{world_size}"
                prefix = "app" if layout == "stateful" else ""
                write_dcp(state, home / name, prefix=prefix, flatten=layout == "flattened")
                pool.run(
                    start_from,
                    ranks=world_size,
                    timeout=120,
                    directory=str(home),
                    checkpoint=name,
                    layout=layout,
                    optimizer=optimizer,
                )
                loaded = same(portable(home / f"{name}-then.pt"), then)
                found = portable(home / f"{name}-later.pt")
                worst = largest_difference(found["model"].values(), later["model"].values())
                good &= read and loaded and worst <= (0.0 if world_size == 2 else TOLERANCE)
                table.add_row(
                    optimizer,
                    layout,
                    _shown(read),
                    f"{world_size} ranks",
                    _shown(loaded),
                    "bit for bit" if same(found, later) else f"largest difference {worst:.1e}",
                )
    console.print(table)
    return good


def _memory(pool: RankPool, root: Path) -> bool:
    table = Table(
        title=f"{TENSORS} tensors of {ELEMENTS * 4 >> 20} MiB (2 for hf), with {ALLOWED >> 20} MiB of memory allowed",
        title_justify="left",
    )
    for heading in ("kind", "written under the limit", "anonymous memory while reading"):
        table.add_column(heading)
    good = True
    for kind in ("torch", "dcp", "hf"):
        [outcome] = pool.outcomes(write_and_read, ranks=1, init=None, timeout=120, kind=kind)
        if not outcome.ok:
            good = False
            table.add_row(kind, "NO", outcome.error_message[:80])
            continue
        before, most = outcome.value
        good &= most - before < ALLOWED
        table.add_row(kind, "yes", f"+{(most - before) / (1 << 20):.1f} MiB")
    console.print(table)
    return good


def _harm(pool: RankPool, root: Path) -> bool:
    ran = root / "ran"
    (root / "bare.pt").write_bytes(pickle.dumps(Canary(ran)))
    torch.save({"w": Canary(ran)}, root / "zip.pt")
    (root / "run").mkdir()
    (root / "run" / ".metadata").write_bytes(pickle.dumps(Canary(ran)))
    attempts: dict[str, Callable[[], Any]] = {
        "a pickle": lambda: read_torch(root / "bare.pt"),
        "a torch file": lambda: read_torch(root / "zip.pt"),
        ".metadata": lambda: read_dcp(root / "run"),
    }
    good = True
    for name, attempt in attempts.items():
        try:
            attempt()
            good, said = False, "READ"
        except CheckpointError as error:
            said = str(error).replace(str(root), "...")
        console.print(f"{name} that makes a directory when it is unpickled: {said}", markup=False, highlight=False)
    good &= not ran.exists()
    console.print(f"directory made: {'YES' if ran.exists() else 'no'}", style="bold")
    return good

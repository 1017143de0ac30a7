"""Runs of ``elastic_train.py`` through the real torchrun, and what they wrote into their diary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from shardrt.checkpoint.series import SaveName

SCRIPT = Path(__file__).with_name("elastic_train.py")
ROOT = Path(__file__).parents[2]
LOSE_AT, SAVE_EVERY = 7, 3
PHASES = ((4, 10), (2, 16), (3, 21))
"""Ranks, and the step up to which they train."""
TOLERANCE = 1e-5
"""After 21 steps: gradients are added up in another order, by other ranks."""


@attrs.frozen(kw_only=True)
class Attempt:
    """One start of the trainer on some ranks."""

    ranks: int
    restarts: int
    first: int
    """The step it went on from."""
    committed: tuple[int, ...]
    """The steps it saved."""
    ended: int | None
    """The step it reached, if it was not interrupted."""


@attrs.frozen(kw_only=True)
class Story:
    """Everything that happened."""

    attempts: tuple[Attempt, ...]
    kept: tuple[int, ...]
    """Steps of the checkpoints that are there at the end."""
    seconds: float
    difference: float
    """The largest between any parameter and that of a run on one rank without interruption."""


def run_elastic(folder: Path) -> Story:
    """Four ranks, one of them lost; then two; then three; and the same alone."""
    started = time.monotonic()
    interrupted, alone = folder / "elastic", folder / "alone"
    for directory in (interrupted, alone):
        directory.mkdir()
    for ranks, until in PHASES:
        _train(interrupted, ranks=ranks, until=until)
    _train(alone, ranks=None, until=PHASES[-1][1])
    diary = _diary(interrupted)
    names = [SaveName.parse(path.name) for path in sorted((interrupted / "checkpoints").iterdir())]
    return Story(
        attempts=attempts_in(diary),
        kept=tuple(name.step for name in names if name is not None),
        seconds=time.monotonic() - started,
        difference=_difference(diary[-1]["parameters"], _diary(alone)[-1]["parameters"]),
    )


def attempts_in(diary: list[dict[str, Any]]) -> tuple[Attempt, ...]:
    """The diary, attempt by attempt."""
    starts = [number for number, entry in enumerate(diary) if entry["what"] == "began"]
    found = []
    for start, stop in zip(starts, [*starts[1:], len(diary)], strict=True):
        began, *rest = diary[start:stop]
        ended = [entry["step"] for entry in rest if entry["what"] == "ended"]
        found.append(
            Attempt(
                ranks=began["ranks"],
                restarts=began["restarts"],
                first=began["step"],
                committed=tuple(entry["step"] for entry in rest if entry["what"] == "committed"),
                ended=ended[0] if ended else None,
            )
        )
    return tuple(found)


def _train(folder: Path, *, ranks: int | None, until: int) -> None:
    launcher = [sys.executable]
    if ranks is not None:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        launcher += ["--nproc-per-node", str(ranks), "--max-restarts", "3"]
    command = [*launcher, str(SCRIPT), str(folder), "--until", str(until), "--save-every", str(SAVE_EVERY)]
    command += ["--lose-at", str(LOSE_AT)] if ranks is not None else []
    done = subprocess.run(
        command, env=launch_environment(os.environ), cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, f"{ranks} ranks to step {until}: {done.stdout[-2000:]}{done.stderr[-4000:]}"


def launch_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Without what a launcher of the tests themselves may have set."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in given.items()
        if name not in launchers and not name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))
    }
    return {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}


def _diary(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "diary.jsonl").read_text(encoding="utf-8").splitlines()]


def _difference(ours: list[Any], theirs: list[Any]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max((torch.tensor(one) - torch.tensor(other)).abs().max().item() for one, other in pairs)

"""The command ``shardrt`` in a process of its own, as users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.ranks.leftovers import MARK, new_mark, wait_for

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-c", "from shardrt.cli import main; main(prog_name='shardrt')")


def answer_of(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    codes: tuple[int, ...] = (0,),
    timeout: float = 300,
) -> dict[str, Any]:
    """The JSON document that a command prints; it must succeed, say nothing else and leave no process."""
    mark = new_mark()
    done = subprocess.run(
        [*COMMAND, *arguments, "--json"],
        env={**os.environ, **(environment or {}), MARK: mark},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode in codes, done.stdout + done.stderr
    assert done.stderr == ""
    assert wait_for(mark, "", 0, seconds=5) == []
    found: dict[str, Any] = json.loads(done.stdout)
    return found

"""Prints what the tests of lost ranks assert: a rank is stopped, and what the others and ``doctor --hang`` say.

Run it with ``python tasks.py accept hang``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from click.testing import CliRunner
from rich.console import Console

from shardrt.cli import main
from shardrt.flight.report import report_name
from shardrt.testing import RankPool
from tests.ranks.lost_ranks import ODD_ONE, TIMEOUT, lose

console = Console(width=170)
_RANKS = 3


def stopped(pool: RankPool) -> bool:
    """One of three ranks is stopped with SIGSTOP: each survivor's error, its seconds, and the explained reports."""
    good = True
    for schedule in ("sync", "interleaved"):
        with tempfile.TemporaryDirectory() as folder:
            outcomes = pool.outcomes(
                lose, ranks=_RANKS, timeout=90, grace=60, how="stopped", schedule=schedule, reports=folder
            )
            console.print(f"{schedule}, timeout {TIMEOUT:g} s: rank {ODD_ONE} stopped with SIGSTOP", style="bold")
            survivors = [outcome for outcome in outcomes if outcome.rank != ODD_ONE]
            for outcome in survivors:
                found = outcome.value or {"seconds": -1.0, "closing": -1.0, "type": outcome.describe(), "text": ""}
                console.print(
                    f"rank {outcome.rank}: after {found['seconds']:.1f} s (closing took {found['closing']:.1f} s): "
                    f"{found['type']}: {found['text']}",
                    markup=False,
                    highlight=False,
                )
                named = f"rank {ODD_ONE}: silent, last heard" in found["text"]
                good &= named and 0 <= found["seconds"] < TIMEOUT + 6
            names = sorted(path.name for path in Path(folder).iterdir())
            console.print(f"reports: {', '.join(names)}", highlight=False)
            done = CliRunner().invoke(main, ["doctor", "--hang", folder], env={"COLUMNS": "160"})
            console.print(done.output, markup=False, highlight=False)
            good &= names == [report_name(outcome.rank, _RANKS) for outcome in survivors]
            good &= done.exit_code == 0 and f"Likely cause (stopped): rank {ODD_ONE} is stopped" in done.output
    return good

"""Prints what every field of torch's FSDP does here, and runs the test that shows it.

Run it with ``python tasks.py accept fsdp_api``.
"""

from __future__ import annotations

import re
import subprocess
import sys

from rich.console import Console
from rich.table import Table

from shardrt.testing import RankPool
from tests.fsdp_table import PAGE, rows_of

console = Console(width=170)
_TOLD = re.compile(r"^(PASSED|FAILED|ERROR) tests/ranks/(?P<test>\w+\.py::\w+)", re.MULTILINE)


def fsdp_api(pool: RankPool) -> bool:
    """Each row of docs/fsdp-api.md with the outcome of its test, which starts ranks of its own."""
    del pool
    rows = rows_of()
    passed, failed = _run(sorted({row.test for row in rows}))
    table = Table(title="torch's FSDP, field by field", title_justify="left")
    for heading in ("class", "field", "here", "test", "outcome"):
        table.add_column(heading, overflow="fold")
    good = 0
    for row in rows:
        is_good = row.test in passed and row.test not in failed
        good += is_good
        table.add_row(row.owner, row.field, row.here, row.test, "passed" if is_good else "FAILED")
    console.print(table)
    refused = sum(row.here.startswith("refused") for row in rows)
    hints = sum(row.here.startswith("a hint") for row in rows)
    console.print(
        f"{len(rows)} fields: {len(rows) - refused - hints} have their effect, {hints} are hints, {refused} are "
        f"refused; the test of {good} passed ({len(passed)} tests)"
    )
    return good == len(rows)


def _run(tests: list[str]) -> tuple[set[str], set[str]]:
    """The tests of which a case passed, and those of which one failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=short", "-p", "no:cacheprovider", "-m", "not long"]
    named = [f"tests/ranks/{test}" for test in tests]
    done = subprocess.run([*command, *named], cwd=PAGE.parents[1], capture_output=True, text=True, check=False)
    told = [(found[1], found["test"]) for found in _TOLD.finditer(done.stdout)]
    failed = {test for outcome, test in told if outcome != "PASSED"}
    if failed or not told:
        console.print(done.stdout[-4000:], done.stderr[-2000:])
    return {test for outcome, test in told if outcome == "PASSED"}, failed

"""The project's tasks: `python tasks.py demo` trains on two local ranks, `python tasks.py test` runs every check.

Needs nothing but Python and pip: it makes a virtual environment in .venv and installs the project there, with the
versions pinned in .ci/constraints.txt. Arguments after the task's name go to the tool that the task runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
THIRD_PARTY = ROOT / "docs" / "tutorial" / "shardrt-stripes"


def main(arguments: list[str]) -> int:
    """Run one task; the result is the exit code of its last command."""
    tasks = {"demo": demo, "test": test, "lint": lint, "long": long, "accept": accept, "setup": setup}
    if not arguments or arguments[0] not in tasks:
        print(f"usage: python tasks.py {{{','.join(tasks)}}} [arguments]")
        return 2
    return tasks[arguments[0]](arguments[1:])


def demo(arguments: list[str]) -> int:
    """Train a small transformer on two local ranks, sharded and not, and compare."""
    install(["."])
    return run(BIN / "shardrt", "demo", *arguments)


def test(arguments: list[str]) -> int:
    """Lint, type-check and run the tests; with arguments, only pytest with these."""
    setup([])
    if arguments:
        return run(BIN / "python", "-m", "pytest", *arguments)
    return lint([]) or in_two_halves("-m", "not long")


COMMANDS = ("tests/ranks/test_bench_*.py", "tests/ranks/test_cli_demo_doctor.py")
"""Ranks that commands start, not the tests' own."""
HALVES = {
    "ranks": ["tests/ranks", *(f"--ignore-glob={pattern}" for pattern in COMMANDS)],
    "beside": [
        *("tests/meta", "tests/plugins", "tests/unit"),
        *(str(path) for pattern in COMMANDS for path in sorted(ROOT.glob(pattern))),
    ],
}


def in_two_halves(*arguments: str) -> int:
    """Run the tests in two processes: those of real ranks wait for one another much of the time.

    What the second one has to say is printed when the first has ended. Tests that failed are run once more, with
    nothing beside them: two halves are much for a small machine, and some tests are about how long waits take. Whatever
    fails twice fails.
    """
    commands = {name: _pytest(name, *arguments) for name in HALVES}
    with tempfile.TemporaryFile() as said:
        beside = subprocess.Popen(commands["beside"], cwd=ROOT, stdout=said, stderr=said)
        try:
            codes = {"ranks": run(*commands["ranks"]), "beside": beside.wait()}
        finally:
            beside.terminate()
        said.seek(0)
        sys.stdout.flush()
        shutil.copyfileobj(said, sys.stdout.buffer)
        sys.stdout.flush()
    for name, code in codes.items():
        if code == 1:  # some tests failed; any other code is another trouble
            print(f"\nonce more, alone: what failed of {', '.join(HALVES[name])}", flush=True)
            codes[name] = run(*_pytest(name, *arguments, "--last-failed", "--last-failed-no-failures", "none"))
    return codes["ranks"] or codes["beside"]


def _pytest(half: str, *arguments: str) -> list[str]:
    return [
        str(BIN / "python"),
        *("-m", "pytest", "-o", f"cache_dir=.pytest_cache/{half}"),
        *(*arguments, *HALVES[half]),
    ]


def long(arguments: list[str]) -> int:
    """Run the storms, series and sweeps that take minutes."""
    setup([])
    return run(BIN / "python", "-m", "pytest", "-m", "long", *arguments)


def accept(arguments: list[str]) -> int:
    """Print what the tests assert as tables of figures."""
    setup([])
    return run(BIN / "python", "-m", "tests.acceptance", *arguments)


def lint(arguments: list[str]) -> int:
    """ruff, its formatter and mypy."""
    del arguments
    return run(BIN / "ruff", "check", ".") or run(BIN / "ruff", "format", "--check", ".") or run(BIN / "mypy")


def setup(arguments: list[str]) -> int:
    """Install the project for development, and the tutorial's distribution as a third party's."""
    del arguments
    install(["-e", ".[dev]"])
    install(["--no-deps", str(THIRD_PARTY)])
    return 0


def install(what: list[str]) -> None:
    """Install into the virtual environment; packages that are there already are kept."""
    if not (BIN / "python").exists():
        print(f"making a virtual environment in {VENV.name}", flush=True)
        venv.create(VENV, with_pip=True)
    # A first run takes minutes (torch is large): pip's own progress is left on.
    if run(BIN / "python", "-m", "pip", "install", "--disable-pip-version-check", "-c", CONSTRAINTS, *what):
        sys.exit(f"could not install {' '.join(what)}: see pip's message above")


def run(*command: object) -> int:
    """Run a command in the project's root and return its exit code."""
    return subprocess.run([str(part) for part in command], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

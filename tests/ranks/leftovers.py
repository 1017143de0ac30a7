"""Which processes of a test are still there: they all inherit a variable that no other process has."""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path

MARK = "TEST_MARK"


def new_mark() -> str:
    """A value that marks the processes of one test."""
    return uuid.uuid4().hex


def marked(mark: str, command: str = "") -> list[int]:
    """Processes with the mark whose command line has the text, without this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment, line = (entry / "environ").read_bytes(), (entry / "cmdline").read_bytes()
            except OSError:  # it has just ended, or is somebody else's
                continue
            if f"{MARK}={mark}".encode() in environment and command.encode() in line:
                found.append(int(entry.name))
    return found


def wait_for(mark: str, command: str, count: int, seconds: float = 180.0) -> list[int]:
    """Wait until so many are there, and return those that are."""
    deadline = time.monotonic() + seconds
    while len(found := marked(mark, command)) != count and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def hear_ctrl_c() -> None:
    """In a child before its program starts: one that is born of a process in the background would ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

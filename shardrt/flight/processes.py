"""What the system knows of a process of this host: whether it is there, and whether it is stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_STATES = {"T": "stopped", "t": "stopped by a debugger", "Z": "gone", "X": "gone", "D": "waiting for a device"}


def process_state(pid: Any) -> str | None:
    """A word for the state of a process; None where the system does not tell.

    Example:
        >>> import os
        >>> from shardrt.flight.processes import process_state
        >>> process_state(os.getpid()), process_state(-1)
        ('running', None)
    """
    if not isinstance(pid, int) or pid <= 0 or not Path("/proc/self/stat").exists():
        return None
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    except OSError:
        return None
    # The second field is the command in parentheses, which may itself hold blanks and parentheses.
    return _STATES.get(text.rpartition(")")[2].split()[0], "running")

"""How much memory there is to be had, by the system and by the limits that containers set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

SPARE_BYTES = 64 * 2**20
"""What is left alone, so that a process at its limit is not killed for a buffer that could lie elsewhere."""


def room(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """Bytes that can still be taken, and who says so.

    Example:
        >>> from shardrt_shm.room import room
        >>> room()[0] > 0
        True
    """
    found = [(_available(proc), "the system"), *_limits(proc, cgroups)]
    return min(found)


def why_no_room(nbytes: int, *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> str:
    """Why so many bytes cannot be had, or nothing.

    Example:
        >>> from shardrt_shm.room import why_no_room
        >>> why_no_room(2**60).startswith("there is no room for 1099511627776 MB of shared memory: ")
        True
    """
    free, who = room(proc, cgroups)
    if nbytes + SPARE_BYTES <= free:
        return ""
    return f"there is no room for {_mb(nbytes)} MB of shared memory: {who} leaves {_mb(max(free, 0))} MB"


def _mb(nbytes: int) -> int:
    return -(-nbytes // 2**20)


def _available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, str]]:
    """What each control group above this process leaves, of both versions."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield from _climb(cgroups, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            yield from _climb(cgroups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _climb(root: Path, path: str, limit_name: str, usage_name: str) -> Iterator[tuple[int, str]]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        group = root.joinpath(*parts[:depth])
        limit, usage = _number(group / limit_name), _number(group / usage_name)
        if limit is not None and usage is not None:
            yield limit - usage + _reclaimable(group), f"the control group {group.name}'s {limit_name}"


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit


def _reclaimable(group: Path) -> int:
    """Pages of files that nobody has used for a while count as used, but make way."""
    try:
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)

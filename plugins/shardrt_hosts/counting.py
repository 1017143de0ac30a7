"""What moved inside hosts and what crossed between them, from what the communicators of both levels count."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from shardrt.comm import Traffic
from shardrt.protocols import Communicator


class TrafficOfLevels:
    """``traffic`` is the sum of all levels; operations are named after theirs, as in ``across all_gather``.

    Example:
        >>> from types import SimpleNamespace
        >>> from shardrt.comm import Traffic
        >>> from shardrt_hosts.counting import TrafficOfLevels
        >>> inside, across = SimpleNamespace(traffic=Traffic()), SimpleNamespace(traffic=Traffic())
        >>> levels = TrafficOfLevels({"inside": inside, "across": across})
        >>> across.traffic.count("all_gather", sent=5, received=7)
        >>> levels.count()
        >>> levels.traffic, levels.by_level["across"].sent
        (Traffic(sent=5, received=7, operations={'across all_gather': 1}), 5)
    """

    def __init__(self, levels: Mapping[str, Communicator]) -> None:
        self.traffic = Traffic()
        self.by_level = {name: Traffic() for name in levels}
        self._levels = levels
        self._lock = threading.Lock()

    def count(self) -> None:
        """Take over what was counted since the last time."""
        with self._lock:
            for name, communicator in self._levels.items():
                now = communicator.traffic.copy()
                new = now - self.by_level[name]
                self.by_level[name] = now
                self._add(name, new)

    def _add(self, level: str, new: Traffic) -> None:
        self.traffic.sent += new.sent
        self.traffic.received += new.received
        for operation, times in new.operations.items():
            if times:
                name = f"{level} {operation}"
                self.traffic.operations[name] = self.traffic.operations.get(name, 0) + times

"""Bytes moved, counted where they move."""

from __future__ import annotations

import attrs


@attrs.define
class Traffic:
    """Payload bytes this rank has sent and received, and how many operations that took.

    Example:
        >>> from shardrt.comm import Traffic
        >>> traffic = Traffic()
        >>> traffic.count("all_gather", sent=10, received=30)
        >>> before = traffic.copy()
        >>> traffic.count("all_gather", sent=1, received=3)
        >>> (traffic - before).sent
        1
    """

    sent: int = 0
    received: int = 0
    operations: dict[str, int] = attrs.field(factory=dict)

    def count(self, operation: str, *, sent: int, received: int) -> None:
        """Add one operation."""
        self.sent += sent
        self.received += received
        self.operations[operation] = self.operations.get(operation, 0) + 1

    def copy(self) -> Traffic:
        """The counts as they are now."""
        return Traffic(self.sent, self.received, dict(self.operations))

    def __add__(self, other: Traffic) -> Traffic:
        operations = dict(self.operations)
        for name, count in other.operations.items():
            operations[name] = operations.get(name, 0) + count
        return Traffic(self.sent + other.sent, self.received + other.received, operations)

    def __sub__(self, earlier: Traffic) -> Traffic:
        operations = {name: count - earlier.operations.get(name, 0) for name, count in self.operations.items()}
        return Traffic(self.sent - earlier.sent, self.received - earlier.received, operations)

"""Who brings gradients to a reduction, where ranks have uneven inputs. See :mod:`shardrt.joining`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    from shardrt.optim.uneven import UnevenOptimizer


@attrs.define(kw_only=True, eq=False)
class Attendance:
    """What an optimizer's buckets must know; a block of uneven inputs changes it as ranks run out."""

    divisor: int | None = None
    """What the sum of the gradients is divided by where they are averaged; None is the number of ranks."""
    absent: bool = False
    """Whether this rank takes part without gradients of its own."""


class Announcer(Protocol):
    """Tells the ranks that have run out of inputs what they are to take part in."""

    def announce(self, event: str, optimizer: UnevenOptimizer, **arguments: Any) -> None:
        """Called right before the collectives of an event. On a rank that only follows it does nothing."""
        ...

"""Which unit's parameters are gathered ahead of their use: told from the order in which units ran last time."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import attrs

from shardrt.errors import ConfigError
from shardrt.sharding.dividing import Parts

BackwardPrefetch = Literal["pre", "post"] | None
Direction = Literal["forward", "backward"]


@attrs.frozen(kw_only=True)
class Prefetch:
    """What is gathered ahead.

    ``backward``: the next unit's parameters are asked for before this unit's gradients are computed (``"pre"``: most
    overlap, two units in memory), after (``"post"``: one unit in memory at a time), or when they are needed (None).
    ``forward``: the next unit's are asked for before this unit computes. ``limit``: how many units may be asked for
    ahead of the one that computes. Where units are divided (see Note [Parts]) all this is said of their parts.

    Example:
        >>> from shardrt.sharding.prefetching import Prefetch
        >>> Prefetch(backward="post").limit
        1
    """

    backward: BackwardPrefetch = "pre"
    forward: bool = True
    limit: int = 1


def prefetch_from(given: Any) -> Prefetch:
    """Ours, torch's ``BackwardPrefetch``, ``"pre"``, ``"post"``, or None for nothing ahead of its use.

    Example:
        >>> from torch.distributed.fsdp import BackwardPrefetch
        >>> from shardrt.sharding.prefetching import prefetch_from
        >>> prefetch_from(BackwardPrefetch.BACKWARD_POST).backward
        'post'
    """
    if given is None:
        return Prefetch(backward=None, forward=False)
    if type(given).__name__ == "BackwardPrefetch" and type(given).__module__.startswith("torch."):
        given = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post"}[given.name]
    if isinstance(given, str):
        given = Prefetch(backward=given)  # type: ignore[arg-type]
    if not isinstance(given, Prefetch) or given.backward not in ("pre", "post", None):
        raise ConfigError(f"prefetch={given!r} is not possible; give 'pre', 'post', None, or Prefetch(...)")
    if type(given.limit) is not int or given.limit < 1:
        raise ConfigError(f"prefetch limit {given.limit!r} is not possible; give a number of units from 1 up")
    return given


class RunningOrder:
    """The order in which units ran, and what is likely to come next.

    Units may be inside others: backward begins with the one that ended last, so it goes by how they ended.
    """

    def __init__(self) -> None:
        self._last: list[int] = []
        self._ended_last: int | None = None
        self._now: list[int] = []
        self._ended: list[int] = []
        self._place = 0

    def begin(self) -> None:
        """A forward of the whole begins."""
        if self._now:
            self._last = self._now
        self._now = []
        self._ended = []
        self._place = 0

    def ran(self, unit: int) -> None:
        """A unit runs now."""
        self._now.append(unit)
        # Follow the recorded order; where this run leaves it, look for the unit further on, else stay.
        with contextlib.suppress(ValueError):
            self._place = self._last.index(unit, self._place) + 1

    def ended(self, unit: int) -> None:
        """A unit's forward has ended."""
        self._ended.append(unit)

    def completed(self) -> None:
        """A forward of the whole has ended, on all ranks alike."""
        self._ended_last = next((unit for unit in reversed(self._ended) if unit), None)

    def ends_last(self, unit: int) -> bool:
        """Whether this one's forward ended last in the last of these, but for the root's."""
        return unit == self._ended_last

    def next_forward(self) -> Iterator[int]:
        """The units that came next last time."""
        return itertools.islice(self._last, self._place, None)

    def next_backward(self, unit: int) -> Iterator[int]:
        """The units that ended before this one in the forward of this iteration, the nearest first."""
        ended = self._ended
        for place in range(len(ended) - 1, -1, -1):
            if ended[place] == unit:
                return (ended[before] for before in range(place - 1, -1, -1))
        return iter(())


class Ahead:
    """Which units are asked for beside the one that computes."""

    def __init__(self, prefetch: Prefetch, order: RunningOrder, parts: Parts) -> None:
        self._prefetch = prefetch
        self._order = order
        self._parts = parts
        self._told: dict[tuple[Direction, int], list[int]] = {}

    def tell(self, direction: Direction, number: int, others: Sequence[int]) -> None:
        """Say which units are asked for when this one computes, in place of those that came next last time."""
        self._told[direction, number] = [part for one in others for part in (one, *self._parts.of(one))]

    def in_forward(self, number: int, *, beyond: bool = False) -> Sequence[int]:
        """When a unit's forward begins. ``beyond``: after the unit and all its parts."""
        told = self._told.get(("forward", number))
        if told is not None:
            return told
        later: Iterable[int] = self._order.next_forward() if self._prefetch.forward else ()
        if beyond:
            later = (one for one in later if self._parts.unit_of(one) != self._parts.unit_of(number))
        return self._counted("forward", number, later)

    def in_backward(self, number: int) -> Sequence[int]:
        """When a unit's backward begins."""
        told = self._told.get(("backward", number))
        if told is not None:
            return told
        if self._prefetch.backward != "pre":
            return ()
        return self._counted("backward", number, self._order.next_backward(number))

    def after_backward(self, number: int) -> Sequence[int]:
        """When a unit's backward has ended, and all that is inside it."""
        if self._prefetch.backward != "post":
            return ()
        later = (one for one in self._order.next_backward(number) if not self._parts.is_inside(one, number))
        return self._counted("backward", number, later)

    def _counted(self, direction: Direction, number: int, later: Iterable[int]) -> Sequence[int]:
        """As many as may be asked for ahead; after a unit for which somebody has said it, no more than its own parts.

        What is left of a divided unit is little, and comes with its first part.
        """
        found: list[int] = []
        count = 0
        unit = self._parts.unit_of(number)
        for one in later:
            if count == self._prefetch.limit:
                break
            if (direction, unit) in self._told and self._parts.unit_of(one) != unit:
                break
            if self._parts.follows(one):
                continue
            found.append(one)
            count += not self._parts.of(one)
        return found

"""Which unit's parameters are gathered ahead of their use: told from the order in which units ran last time."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, Literal

import attrs

from shardrt.errors import ConfigError

BackwardPrefetch = Literal["pre", "post"] | None


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

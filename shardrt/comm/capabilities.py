"""What a backend can do by itself, declared up front so that nothing is discovered in the middle of a step."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class OpSupport:
    """The limits of one operation.

    Example:
        >>> from shardrt.comm import OpSupport
        >>> OpSupport(world_sizes_refused=frozenset({3})).takes("float32", world_size=3)
        False
    """

    uneven: bool = True
    """Takes runs of different sizes, empty ones included."""
    dtypes: frozenset[str] | None = None
    """The dtypes it takes; None for every one."""
    world_sizes_refused: frozenset[int] = frozenset()

    def takes(self, dtype: str, *, world_size: int) -> bool:
        """Whether it runs with this dtype at this world size."""
        return (self.dtypes is None or dtype in self.dtypes) and world_size not in self.world_sizes_refused


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a communicator does natively. ``None`` for an operation means that it has none; the core then negotiates.

    Example:
        >>> from shardrt.comm import Capabilities
        >>> Capabilities().average
        True
    """

    average: bool = True
    """Reductions can average; otherwise the core sums and divides."""
    reduce_scatter: OpSupport | None = OpSupport()
    all_gather: OpSupport | None = OpSupport()
    all_reduce: OpSupport | None = OpSupport()
    all_to_all: OpSupport | None = OpSupport()
    broadcast: OpSupport | None = OpSupport()
    concurrent: bool = False
    """Operations of two communicators over the same ranks may be under way at once."""
    needs_streams: bool = False
    """Work is ordered by device streams, not by the host."""

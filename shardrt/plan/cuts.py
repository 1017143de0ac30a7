"""Parameters laid end to end and cut into even runs, one per rank.

Note on alignment. A CPU kernel works through a tensor in blocks of vectors and does what is left at the end one element
at a time. The two may round differently (a fused multiply-add rounds once, a multiplication and an addition twice; a
16-bit sum may stay in 32 bits between operations), so an element that was inside a block can differ in its last bit
once a cut moves it into a remainder. Cuts at multiples of 64 elements from a parameter's start leave every block
where it was: 64 is a block of two AVX-512 vectors of 16-bit numbers. Measured on AVX2 only: docs/partitioners.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardrt.errors import ConfigError
from shardrt.plan.params import ParamSpec
from shardrt.plan.partition import Shard

BLOCK = 64
"""Elements at whose multiples a parameter can be cut without changing a bit of an elementwise update."""

_STEPS_PER_RUN = 4
"""A run shorter than this many steps gets a finer step: small models use every rank, if not to the last bit."""


class EvenCutter:
    """Cuts one list of parameters after another, each on its own, and evens out over all what a single one cannot.

    Each list is laid end to end and cut into one run per rank, ranks ascending. With ``align=1`` runs differ by one
    element at most; the longer ones are dealt to the ranks in turn, starting with ``first`` and going on where the
    list before ended. A larger ``align`` cuts at parameter ends and at its multiples from a parameter's start; over
    all lists of one dtype (trained and frozen ones apart) no rank is then off by more than ``align`` elements. Where
    an even run would be shorter than four times ``align``, that is halved until it fits.

    Example:
        >>> from shardrt import ParamSpec
        >>> from shardrt.plan import EvenCutter
        >>> params = [ParamSpec(name=name, shape=(5,), dtype="float32") for name in "ab"]
        >>> for shard in EvenCutter(world_size=3, align=1).cut(params):
        ...     print(shard)
        Shard(param='a', start=0, stop=4, rank=0)
        Shard(param='a', start=4, stop=5, rank=1)
        Shard(param='b', start=0, stop=2, rank=1)
        Shard(param='b', start=2, stop=5, rank=2)
    """

    def __init__(self, *, world_size: int, align: int = BLOCK, first: int = 0) -> None:
        if type(align) is not int or align < 1:
            raise ConfigError(f"align must be a number of elements from 1 up, got {align!r}")
        self.world_size = world_size
        self.align = align
        self._first = first
        self._drifts: dict[tuple[str, bool], list[int]] = {}

    def cut(self, params: Sequence[ParamSpec]) -> list[Shard]:
        """The shards, in order, of parameters that have one dtype and are all trained or all frozen."""
        if not params:
            return []
        total = sum(spec.numel for spec in params)
        ends = self._even_ends(total)
        step = self.align
        while step > 1 and total < step * _STEPS_PER_RUN * self.world_size:
            step //= 2
        if step == 1:
            return _cut_at(params, ends)
        drift = self._drifts.setdefault((params[0].dtype, params[0].trainable), [0] * self.world_size)
        cuts = _stepwise_ends(params, ends, step, drift)
        return _cut_at(params, cuts)

    def _even_ends(self, total: int) -> list[int]:
        """Where each rank's run ends."""
        share, left = divmod(total, self.world_size)
        ends = []
        end = 0
        for rank in range(self.world_size):
            end += share + ((rank - self._first) % self.world_size < left)
            ends.append(end)
        self._first = (self._first + left) % self.world_size
        return ends


def _stepwise_ends(params: Sequence[ParamSpec], ends: Sequence[int], step: int, drift: list[int]) -> list[int]:
    """The ends moved to the nearest allowed cut, against the sum of all earlier moves, which is kept in ``drift``.

    Rounding alone would move the ends of equal lists in one direction each time, and the moves would add up.
    """
    moved = []
    remaining = iter(params)
    begin, numel = 0, next(remaining).numel
    half = step // 2
    for rank, end in enumerate(ends[:-1]):
        wanted = end - max(-half, min(half, drift[rank]))
        while wanted > begin + numel:
            begin, numel = begin + numel, next(remaining).numel
        below = wanted - (wanted - begin) % step
        above = min(below + step, begin + numel)
        found = below if wanted - below <= above - wanted else above
        drift[rank] += found - end
        moved.append(found)
    return [*moved, ends[-1]]


def _cut_at(params: Sequence[ParamSpec], ends: Sequence[int]) -> list[Shard]:
    """The shards between the ends of the ranks' runs, which ascend and cover everything."""
    shards: list[Shard] = []
    begin = rank = 0
    end = ends[0]
    for spec in params:
        name, numel = spec.name, spec.numel
        start = 0
        while end < begin + numel:
            if end > begin + start:
                shards.append(Shard(name, start, end - begin, rank))
                start = end - begin
            rank += 1
            end = ends[rank]
        if start < numel or not numel:
            shards.append(Shard(name, start, numel, rank))
        begin += numel
    return shards

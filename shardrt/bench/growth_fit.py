"""How a cost grows: times at several sizes, the exponent that fits them, and whether that is worse than n log n.

Note [At most n log n]: on a log-log plot ``n ** e`` is a line of slope ``e``. The slope is fitted over the upper half
of the sizes (three at least, where there are as many): at small ones constants outweigh what grows. ``n log n`` has a
slope there too, a little above 1, which the fitted one may pass by a tolerance for noise. A cost that is still mostly
constant has a slope near 0, and passes: it has not begun to grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs

TOLERANCE = 0.15
"""How far above the slope of n log n a measured one may be."""
_FITTED_SIZES = 3


def slope(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """The exponent of the growth: least squares on logarithms. None where there is nothing to fit.

    Example:
        >>> from shardrt.bench.growth_fit import slope
        >>> round(slope([10, 100, 1000], [3, 300, 30000]), 3)
        2.0
    """
    points = [(math.log(size), math.log(value)) for size, value in zip(sizes, values, strict=True) if size > 0 < value]
    if len({x for x, _ in points}) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


@attrs.frozen(kw_only=True)
class Curve:
    """One cost along one axis.

    Example:
        >>> from shardrt.bench.growth_fit import Curve
        >>> curve = Curve(axis="ranks", what="an exchange", sizes=(2, 4, 8, 16), seconds=(1.0, 4.0, 16.0, 64.0))
        >>> round(curve.exponent, 2), curve.within
        (2.0, False)
    """

    axis: str
    what: str
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    """On the clock, of the slowest rank: the best of the rounds."""
    cpu: tuple[float, ...] | None = None
    """Processor time of the busiest rank, where ranks share processors; the best of the rounds."""
    judged_by: str = "seconds"
    """``seconds``, ``cpu``, or ``counted`` where ``seconds`` are no seconds but a count."""
    by_nature: str = ""
    """Why more than n log n is what was asked for; empty where it is not."""

    @property
    def upper(self) -> slice:
        """The sizes that are fitted. See Note [At most n log n]."""
        grown = [index for index, size in enumerate(self.sizes) if size > 1]
        count = max(_FITTED_SIZES, -(-len(grown) // 2))
        return slice(grown[-count:][0] if grown else 0, None)

    @property
    def exponent(self) -> float | None:
        """Of what it is judged by."""
        judged = self.cpu if self.judged_by == "cpu" and self.cpu is not None else self.seconds
        return slope(self.sizes[self.upper], judged[self.upper])

    @property
    def clock_exponent(self) -> float | None:
        """Of the time on the clock."""
        return slope(self.sizes[self.upper], self.seconds[self.upper])

    @property
    def bound(self) -> float | None:
        """The exponent of n log n over the same sizes."""
        sizes = self.sizes[self.upper]
        return slope(sizes, [size * math.log2(size) for size in sizes])

    @property
    def within(self) -> bool | None:
        """Whether it grows with n log n at most; None where too few sizes tell nothing."""
        if self.exponent is None or self.bound is None:
            return None
        return self.exponent <= self.bound + TOLERANCE

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.within is None:
            return "too few sizes"
        return "yes" if self.within else f"by nature: {self.by_nature}" if self.by_nature else "NO"

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {
            "axis": self.axis,
            "what": self.what,
            "sizes": list(self.sizes),
            "counts" if self.judged_by == "counted" else "seconds": list(self.seconds),
            "cpu_seconds_of_busiest_rank": None if self.cpu is None else list(self.cpu),
            "judged_by": self.judged_by,
            "exponent": self.exponent,
            "clock_exponent": None if self.judged_by == "counted" else self.clock_exponent,
            "n_log_n_exponent": self.bound,
            "at_most_n_log_n": self.within,
            "by_nature": self.by_nature or None,
        }

"""What a collective costs: a model with a few numbers, fitted to measured ones, and its closed formulas.

Note [Cost model]: a collective of n ranks over M bytes costs ``base`` once (issuing it, waking threads), ``latency``
for each message that must have come before the next can go, ``overhead`` for each message that a rank sends beside
others, ``per_byte`` for what it sends, and ``reduce_per_byte`` for what it adds up. A rank sends (n - 1) / n of the
bytes in a reduce-scatter and in an all-gather, whatever the algorithm; algorithms differ in how many messages wait for
one another:

- direct: everybody sends to everybody at once; one latency, n - 1 overheads. What shardrt's Gloo backend does.
- ring: n - 1 rounds, each of which waits for the one before.
- doubling: log2(n) rounds, with partners twice as far away in each.
- hierarchical: direct inside groups (hosts), then direct across them with a group's share of the bytes.

Note [Sharing processors]: ranks that share a processor take turns, on the wire too, since loopback is made of processor
time. With s ranks for each processor everything is taken to last s times as long; measured times are divided by s
before the fit, so that the model is of ranks with processors of their own.

What the model leaves out: contention in a network's switches, many senders to one receiver at once, a receiver's memory
bandwidth, lost packets, and that large worlds are seldom one homogeneous network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from shardrt.errors import ConfigError

ALGORITHMS = ("direct", "ring", "doubling", "hierarchical")


@attrs.frozen(kw_only=True)
class Sample:
    """One measured collective."""

    operation: str
    """``all_gather`` or ``reduce_scatter``."""
    ranks: int
    nbytes: int
    seconds: float
    sharing: float
    """Ranks for each processor, 1 at least. See Note [Sharing processors]."""


@attrs.frozen(kw_only=True)
class CostModel:
    """See Note [Cost model]. Seconds, and seconds per byte.

    Example:
        >>> from shardrt.bench.simulate_model import CostModel
        >>> model = CostModel(base=0.0, latency=1e-5, overhead=1e-6, per_byte=1e-9, reduce_per_byte=1e-10)
        >>> round(model.formula("ring", 1001, 0, reduces=False), 6), round(model.formula("doubling", 1024, 0), 6)
        (0.01, 0.0001)
    """

    base: float
    latency: float
    overhead: float
    per_byte: float
    reduce_per_byte: float
    per_host: int = 8
    """Ranks in a group, under the hierarchical algorithm."""

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ConfigError(f"{name} of a cost model must be a number from 0 up, got {value!r}")
        if type(self.per_host) is not int or self.per_host < 1:
            raise ConfigError(f"per_host must be a whole number from 1 up, got {self.per_host!r}")

    def each_byte(self, *, reduces: bool) -> float:
        """Sending one, and adding it up."""
        return self.per_byte + (self.reduce_per_byte if reduces else 0.0)

    def group(self, ranks: int) -> int:
        """The largest group that shares so many ranks out evenly."""
        return max(size for size in range(1, min(self.per_host, ranks) + 1) if ranks % size == 0)

    def formula(self, algorithm: str, ranks: int, nbytes: float, *, reduces: bool = True) -> float:
        """What a collective costs if all ranks start it at once."""
        if ranks == 1:
            return 0.0
        if algorithm == "hierarchical":
            inner = self.group(ranks)
            within = self.formula("direct", inner, nbytes, reduces=reduces)
            return within + self.formula("direct", ranks // inner, nbytes / inner, reduces=reduces)
        rounds = {
            "direct": self.latency + self.overhead * (ranks - 1),
            "ring": self.latency * (ranks - 1),
            "doubling": self.latency * math.ceil(math.log2(ranks)),
        }
        if algorithm not in rounds:
            raise ConfigError(f"there is no algorithm {algorithm!r}; choose among {', '.join(ALGORITHMS)}")
        return self.base + rounds[algorithm] + (ranks - 1) / ranks * nbytes * self.each_byte(reduces=reduces)

    def shared(self, sharing: float) -> CostModel:
        """The same where several ranks share a processor. See Note [Sharing processors]."""
        slower = {name: value * sharing for name, value in attrs.asdict(self).items() if name != "per_host"}
        return attrs.evolve(self, **slower)

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return attrs.asdict(self)

    @classmethod
    def from_json(cls, data: object) -> CostModel:
        """The inverse of :meth:`to_json`."""
        names = {field.name for field in attrs.fields(cls)}
        if not isinstance(data, Mapping) or set(data) != names:
            found = sorted(data) if isinstance(data, Mapping) else type(data).__name__
            raise ConfigError(f"a cost model has the fields {', '.join(sorted(names))}; got {found}")
        return cls(**data)


def fit(samples: Sequence[Sample], *, latency: float) -> CostModel:
    """The model nearest to what was measured, by relative error; no cost is below zero.

    Example:
        >>> from shardrt.bench.simulate_model import CostModel, Sample, fit
        >>> truth = CostModel(base=1e-4, latency=2e-5, overhead=3e-6, per_byte=1e-9, reduce_per_byte=2e-10)
        >>> samples = [
        ...     Sample(
        ...         operation=operation,
        ...         ranks=n,
        ...         nbytes=size,
        ...         seconds=truth.formula("direct", n, size, reduces=operation == "reduce_scatter"),
        ...         sharing=1.0,
        ...     )
        ...     for operation in ("all_gather", "reduce_scatter")
        ...     for n in (2, 4, 8)
        ...     for size in (2**12, 2**20, 2**24)
        ... ]
        >>> round(fit(samples, latency=2e-5).reduce_per_byte * 1e9, 3)
        0.2
    """
    rows, wanted = [], []
    for sample in samples:
        travelling = (sample.ranks - 1) / sample.ranks * sample.nbytes
        reduced = travelling if sample.operation == "reduce_scatter" else 0.0
        seconds = sample.seconds / sample.sharing
        rows.append([1 / seconds, (sample.ranks - 1) / seconds, travelling / seconds, reduced / seconds])
        wanted.append(1.0)
    start, overhead, per_byte, reduce_per_byte = _not_negative(np.array(rows), np.array(wanted))
    return CostModel(
        base=max(start - latency, 0.0),
        latency=min(latency, start) if start else latency,
        overhead=overhead,
        per_byte=per_byte,
        reduce_per_byte=reduce_per_byte,
    )


def _not_negative(rows: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> list[float]:
    """Least squares without what would be negative."""
    columns = list(range(rows.shape[1]))
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    while columns:
        found, *_ = np.linalg.lstsq((rows / scale)[:, columns], wanted, rcond=None)
        if (found >= 0).all():
            break
        columns.pop(int(found.argmin()))
    answer = [0.0] * rows.shape[1]
    for column, value in zip(columns, found if columns else [], strict=True):
        answer[column] = float(value / scale[column])
    return answer


def fit_error(model: CostModel, samples: Sequence[Sample]) -> float:
    """The median of how far the model is off, as a share of what was measured."""
    off = []
    for sample in samples:
        reduces = sample.operation == "reduce_scatter"
        told = model.shared(sample.sharing).formula("direct", sample.ranks, sample.nbytes, reduces=reduces)
        off.append(abs(told / sample.seconds - 1))
    return float(np.median(off))

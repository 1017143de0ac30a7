"""Prints what each strategy of rt.shard holds and sends, beside the formulas, on a model of 40 million parameters.

Run it with ``python tasks.py accept memory``, ``traffic`` and ``hybrid``; the last needs root and iproute2. The same
tables for other sizes, schedules and numbers of ranks: ``shardrt bench strategies``.
"""

from __future__ import annotations

import functools

from shardrt.bench.strategies import StrategiesReport, StrategiesSettings, count_strategies
from shardrt.cli.strategies import show_strategies
from shardrt.testing import RankPool

SIZE = "40m"
PATIENCE = 600.0


@functools.cache
def counted() -> StrategiesReport:
    """Counted once for both tables."""
    return count_strategies(StrategiesSettings(size=SIZE), patience=PATIENCE)


def memory(pool: RankPool) -> bool:
    """At most 5 % and one unit above the formulas, at rest and at the peak of a step; by default and, where parameters
    come and go, with units divided."""
    del pool  # the benchmark starts ranks of its own
    show_strategies(counted(), traffic=False)
    # Units that come and go whole are more than one at a time: the same with these gathered layer by layer.
    few = StrategiesSettings(size=SIZE, strategies=("full_shard", "hybrid_shard"), divide_units=True)
    divided = count_strategies(few, patience=PATIENCE)
    show_strategies(divided, traffic=False)
    for how, report in {"by default": counted(), "with divide_units=True": divided}.items():
        above = [one for one in report.results if not (one.rest_within and one.peak_within)]
        named = ", ".join(f"{one.strategy} with {one.ranks} ranks" for one in above)
        print(f"Above it {how}: {named or 'nothing'}.")
    return counted().memory_within and divided.memory_within


def traffic(pool: RankPool) -> bool:
    """The payload of a step within 1 % of the formulas."""
    del pool
    show_strategies(counted(), memory=False)
    return counted().traffic_within


def hybrid(pool: RankPool) -> bool:
    """On two hosts with two ranks each: what crosses between them, full_shard beside the hybrid strategies."""
    del pool
    names = ("full_shard", "hybrid_shard", "hybrid_shard_zero2")
    settings = StrategiesSettings(ranks=(4,), strategies=names, link="1gbit", size=SIZE, steps=1)
    report = count_strategies(settings, patience=PATIENCE)
    show_strategies(report, memory=False)
    crossed = {name: report[4, name].device_bytes for name in names}
    good = report.traffic_within
    for name in names[1:]:
        result = report[4, name]
        # The device counts TCP's headers and acknowledgements too.
        good &= result.device_bytes is not None and result.device_bytes <= 1.02 * result.theory.crossing
        good &= (crossed[name] or 0) < (crossed["full_shard"] or 0) / 2
    return good

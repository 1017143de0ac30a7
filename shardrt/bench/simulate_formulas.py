"""What a step should cost, in closed form: the costs of collectives put together as the schedule says.

F, B and U are the seconds of forward, backward and update; R and G those of all reductions and gathers, r and g with an
index those of one bucket; b the parts of backward. Ranks that are delayed at random, each step anew, by an exponential
time of mean m: the slowest of n is delayed by m (1 + 1/2 + ... + 1/n), and everybody waits for it.

| | formula | kind |
| --- | --- | --- |
| sync | F + B + R + U + G | exact |
| bucket | F + max over k (b1 + ... + bk + rk + ... + r_last), then updates and gathers behind one another | exact |
| interleaved | max(F + B + r_last + u_last + g_first, R + G) | a bound: gathers hide behind all that computes |
| priority | max(F + B + r_last + u + g_first, R + G) | a bound: gathers are hidden behind the next forward |
| full_shard | max(F + B + g_first + r_last, G + G + R) + U | a bound: a unit's gather hides behind the one before |
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from shardrt.bench.simulate_events import FULL_SHARD, StepWork

EXACT = ("sync", "bucket")
"""Where the simulation without delays must meet the formula; elsewhere it is a bound from below."""

Cost = Callable[[float, bool], float]
"""Seconds of a collective over so many bytes, that are added up or not."""


def step_formula(what: str, work: StepWork, cost: Cost) -> float:
    """Seconds of a step without delays.

    Example:
        >>> from shardrt.bench.simulate_events import StepWork
        >>> from shardrt.bench.simulate_formulas import step_formula
        >>> work = StepWork(forward=(1.0,), backward=(2.0,), update=(0.5,), nbytes=(8.0,))
        >>> step_formula("sync", work, lambda nbytes, reduces: nbytes)
        19.5
    """
    reductions = [cost(nbytes, True) for nbytes in work.nbytes]
    gathers = [cost(nbytes, False) for nbytes in work.nbytes]
    forward, backward, update = sum(work.forward), sum(work.backward), sum(work.update)
    if what == "sync":
        return forward + backward + sum(reductions) + update + sum(gathers)
    if what == "bucket":
        return forward + _bucket_tail(work, reductions, gathers)
    if what in ("interleaved", "priority"):  # which differ in when they may update, not in what bounds them
        late = forward + backward + reductions[-1] + work.update[-1] + gathers[-1]
        return max(late, sum(reductions) + sum(gathers))
    assert what == FULL_SHARD
    late = forward + backward + gathers[-1] + reductions[-1]
    return max(late, 2 * sum(gathers) + sum(reductions)) + update


def _bucket_tail(work: StepWork, reductions: list[float], gathers: list[float]) -> float:
    """From the start of backward: the longest of all ways through reductions, updates and gathers."""
    filled = list(accumulate(work.backward))
    last = len(filled)
    arrived = [max(filled[i] + sum(reductions[i : k + 1]) for i in range(k + 1)) for k in range(last)]
    updated = [
        max(max(arrived[j], filled[-1]) + sum(work.update[j : k + 1]) for j in range(k + 1)) for k in range(last)
    ]
    return max(max(updated[k], arrived[-1]) + sum(gathers[k:]) for k in range(last))


def slowest_delay(mean: float, ranks: int) -> float:
    """The expected longest of so many exponential delays.

    Example:
        >>> from shardrt.bench.simulate_formulas import slowest_delay
        >>> slowest_delay(1.0, 2), round(slowest_delay(1.0, 10_000), 2)
        (1.5, 9.79)
    """
    return mean * sum(1.0 / rank for rank in range(1, ranks + 1))

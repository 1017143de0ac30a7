"""When each rank of many is done: collectives and schedules as arrays over ranks.

Each array has one time per rank. A collective takes when each rank starts it and gives when each is done with it; a
schedule is a program of computing and collectives, the same on every rank, that moves two clocks of each rank: that of
its computation and that of its wire. There is no object for a rank or a message, so ten thousand ranks take as long as
their additions do.

Note [Everybody to everybody]: in a direct exchange rank j sends to j + 1, j + 2, ... in turn, so what it sends to rank
i leaves at its k-th turn, k = (i - j) mod n. Rank i is done when the last of these has come: max over j of start[j] +
k * c. That is n * n terms, and two running maxima: over j < i, where k * c is i * c - j * c, and over j > i, where
another n * c is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from shardrt.bench.simulate_model import CostModel

Times = npt.NDArray[np.float64]
"""Seconds, one for each rank."""
Collective = Callable[[Times, float, bool], Times]
"""From when ranks start, how many bytes there are and whether they are added up, to when ranks are done."""
SCHEDULES = ("sync", "bucket", "interleaved", "priority")
FULL_SHARD = "full_shard"


def collective(model: CostModel, algorithm: str) -> Collective:
    """How one algorithm proceeds.

    Example:
        >>> import numpy as np
        >>> from shardrt.bench.simulate_events import collective
        >>> from shardrt.bench.simulate_model import CostModel
        >>> model = CostModel(base=0.0, latency=1.0, overhead=0.0, per_byte=0.0, reduce_per_byte=0.0)
        >>> collective(model, "ring")(np.array([0.0, 5.0, 0.0]), 0, False).tolist()
        [7.0, 7.0, 7.0]
    """
    return {
        "direct": lambda start, nbytes, reduces: _direct(model, start[None, :], nbytes, reduces)[0],
        "ring": lambda start, nbytes, reduces: _ring(model, start, nbytes, reduces),
        "doubling": lambda start, nbytes, reduces: _doubling(model, start, nbytes, reduces),
        "hierarchical": lambda start, nbytes, reduces: _hierarchical(model, start, nbytes, reduces),
    }[algorithm]


def _direct(model: CostModel, starts: Times, nbytes: float, reduces: bool) -> Times:
    """Groups of ranks, one per row. See Note [Everybody to everybody]."""
    ranks = starts.shape[1]
    if ranks == 1:
        return starts
    turn = model.overhead + nbytes / ranks * model.per_byte
    places = np.arange(ranks) * turn
    levelled = starts - places
    before = np.full_like(starts, -np.inf)
    before[:, 1:] = np.maximum.accumulate(levelled, axis=1)[:, :-1]
    after = np.full_like(starts, -np.inf)
    after[:, :-1] = np.maximum.accumulate(levelled[:, ::-1], axis=1)[:, ::-1][:, 1:] + ranks * turn
    arrived = np.maximum(before, after) + places
    sent = starts + (ranks - 1) * turn
    added_up = (ranks - 1) / ranks * nbytes * model.reduce_per_byte if reduces else 0.0
    done: Times = np.maximum(arrived, sent) + model.base + model.latency + added_up
    return done


def _ring(model: CostModel, start: Times, nbytes: float, reduces: bool) -> Times:
    """After n - 1 rounds everybody has waited for everybody: no round need be looked at by itself."""
    ranks = len(start)
    if ranks == 1:
        return start
    each = model.latency + nbytes / ranks * model.each_byte(reduces=reduces)
    return np.full_like(start, start.max() + model.base + (ranks - 1) * each)


def _doubling(model: CostModel, start: Times, nbytes: float, reduces: bool) -> Times:
    ranks = len(start)
    now = start + (model.base if ranks > 1 else 0.0)
    distance, left = 1, nbytes * (ranks - 1) / ranks
    while distance < ranks:
        # Half of what is left travels in each round, and all of the rest in the last.
        travelling = left if distance * 2 >= ranks else left / 2
        left -= travelling
        now = np.maximum(now, np.roll(now, distance)) + model.latency + travelling * model.each_byte(reduces=reduces)
        distance *= 2
    return now


def _hierarchical(model: CostModel, start: Times, nbytes: float, reduces: bool) -> Times:
    inner = model.group(len(start))
    within = _direct(model, start.reshape(-1, inner), nbytes, reduces)
    return _direct(model, np.ascontiguousarray(within.T), nbytes / inner, reduces).T.reshape(-1)


@attrs.frozen(kw_only=True)
class StepWork:
    """What a rank computes in a step, by bucket, in the order in which backward fills them. Seconds and bytes."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]
    nbytes: tuple[float, ...]

    @classmethod
    def share_out(cls, sizes: Sequence[float], *, forward: float, backward: float, update: float) -> StepWork:
        """Computation is taken to go with bytes, as it does where layers are alike.

        Example:
            >>> from shardrt.bench.simulate_events import StepWork
            >>> StepWork.share_out([1, 3], forward=4.0, backward=8.0, update=2.0).backward
            (2.0, 6.0)
        """
        shares = [size / sum(sizes) for size in sizes]
        return cls(
            forward=tuple(forward * share for share in shares),
            backward=tuple(backward * share for share in shares),
            update=tuple(update * share for share in shares),
            nbytes=tuple(float(size) for size in sizes),
        )


def simulate_step(what: str, work: StepWork, run: Collective, delays: Times, *, one_clock: bool = False) -> float:
    """Seconds of a step, on average over those after the first. ``delays``: by step and rank, spread over backward.

    ``what`` is a schedule (of ZeRO-1 and ZeRO-2, which move the same) or ``full_shard`` (ZeRO-3). With ``one_clock``
    a rank's wire and its computation share one processor, so that nothing overlaps.
    """
    clocks = _Clocks(delays.shape[1], run, one_clock)
    program = {
        "sync": _sync,
        "bucket": _bucket,
        "interleaved": _interleaved,
        "priority": _priority,
        FULL_SHARD: _full_shard,
    }["sync" if one_clock and what in SCHEDULES else what]  # where nothing overlaps, all schedules are the plain one
    gathered: list[Times] = [clocks.compute] * len(work.nbytes)
    ends = []
    for number in range(len(delays)):
        gathered = program(clocks, work, delays[number], gathered)
        ends.append(clocks.compute.max())
    return float((ends[-1] - ends[0]) / (len(ends) - 1))


class _Clocks:
    """The two clocks of every rank."""

    def __init__(self, ranks: int, run: Collective, one_clock: bool) -> None:
        self.compute = np.zeros(ranks)
        self._wire = np.zeros(ranks)
        self._run = run
        self._one = one_clock

    def work(self, seconds: float | Times) -> Times:
        """Compute."""
        self.compute = self.compute + seconds
        return self.compute

    def wait(self, until: Times) -> None:
        """Let the computation wait."""
        self.compute = np.maximum(self.compute, until)

    def move(self, ready: Times, nbytes: float, *, reduces: bool) -> Times:
        """A collective that may start when its data are ready and the wire has done all that came before."""
        done = self._run(np.maximum(ready, self._wire), nbytes, reduces)
        self._wire = done
        if self._one:
            self.wait(done)
        return done


def _slower(work: StepWork, bucket: int, delay: Times) -> Times:
    share = work.nbytes[bucket] / sum(work.nbytes)
    return work.backward[bucket] + share * delay


def _sync(clocks: _Clocks, work: StepWork, delay: Times, gathered: list[Times]) -> list[Times]:
    clocks.work(sum(work.forward))
    clocks.work(sum(work.backward) + delay)
    for bucket, nbytes in enumerate(work.nbytes):
        clocks.wait(clocks.move(clocks.compute, nbytes, reduces=True))
        clocks.work(work.update[bucket])
    for nbytes in work.nbytes:
        clocks.wait(clocks.move(clocks.compute, nbytes, reduces=False))
    return gathered


def _reduce_in_backward(clocks: _Clocks, work: StepWork, delay: Times) -> list[Times]:
    reduced = []
    for bucket, nbytes in enumerate(work.nbytes):
        ready = clocks.work(_slower(work, bucket, delay))
        reduced.append(clocks.move(ready, nbytes, reduces=True))
    return reduced


def _bucket(clocks: _Clocks, work: StepWork, delay: Times, gathered: list[Times]) -> list[Times]:
    clocks.work(sum(work.forward))
    reduced = _reduce_in_backward(clocks, work, delay)
    arrived = []
    for bucket, nbytes in enumerate(work.nbytes):
        clocks.wait(reduced[bucket])
        arrived.append(clocks.move(clocks.work(work.update[bucket]), nbytes, reduces=False))
    for until in arrived:
        clocks.wait(until)
    return gathered


def _forward_as_gathered(clocks: _Clocks, work: StepWork, gathered: list[Times]) -> None:
    for bucket in reversed(range(len(work.nbytes))):  # forward comes the other way round
        clocks.wait(gathered[bucket])
        clocks.work(work.forward[bucket])


def _priority(clocks: _Clocks, work: StepWork, delay: Times, gathered: list[Times]) -> list[Times]:
    _forward_as_gathered(clocks, work, gathered)
    reduced = _reduce_in_backward(clocks, work, delay)
    for bucket, until in enumerate(reduced):
        clocks.wait(until)
        clocks.work(work.update[bucket])
    found = list(gathered)
    for bucket in reversed(range(len(work.nbytes))):
        found[bucket] = clocks.move(clocks.compute, work.nbytes[bucket], reduces=False)
    return found


def _interleaved(clocks: _Clocks, work: StepWork, delay: Times, gathered: list[Times]) -> list[Times]:
    """A thread updates beside backward, where every third bucket is gathered too; the others during the next forward.
    Of what waits for the wire in backward, the one that was ready first on most ranks goes."""
    _forward_as_gathered(clocks, work, gathered)
    count = len(work.nbytes)
    ready = [clocks.work(_slower(work, bucket, delay)) for bucket in range(count)]
    early = [bucket for bucket in range(0, count, 3) if bucket + 1 < count]
    updater = np.zeros_like(clocks.compute)
    updated: list[Times] = []
    found = list(gathered)
    while len(updated) < count or early:
        gathers = bool(early) and early[0] < len(updated)
        if len(updated) < count and not (gathers and np.median(updated[early[0]]) < np.median(ready[len(updated)])):
            bucket = len(updated)
            done = clocks.move(ready[bucket], work.nbytes[bucket], reduces=True)
            updater = np.maximum(updater, done) + work.update[bucket]
            updated.append(updater)
        else:
            bucket = early.pop(0)
            found[bucket] = clocks.move(updated[bucket], work.nbytes[bucket], reduces=False)
    clocks.wait(updater)
    for bucket in reversed(range(count)):
        if bucket % 3 or bucket + 1 == count:
            found[bucket] = clocks.move(clocks.compute, work.nbytes[bucket], reduces=False)
    return found


def _full_shard(clocks: _Clocks, work: StepWork, delay: Times, gathered: list[Times]) -> list[Times]:
    """Buckets are units. Each is gathered while the one before computes, in forward and again in backward."""
    last = len(work.nbytes) - 1
    order = list(reversed(range(last + 1)))
    arrived = clocks.move(clocks.compute, work.nbytes[order[0]], reduces=False)
    for place, unit in enumerate(order):
        clocks.wait(arrived)
        if place < last:
            arrived = clocks.move(clocks.compute, work.nbytes[order[place + 1]], reduces=False)
        clocks.work(work.forward[unit])
    arrived = clocks.move(clocks.compute, work.nbytes[0], reduces=False)
    reduced = []
    for unit in range(last + 1):
        clocks.wait(arrived)
        if unit < last:
            arrived = clocks.move(clocks.compute, work.nbytes[unit + 1], reduces=False)
        ready = clocks.work(_slower(work, unit, delay))
        reduced.append(clocks.move(ready, work.nbytes[unit], reduces=True))
    for until in reduced:
        clocks.wait(until)
    clocks.work(sum(work.update))
    return gathered

"""What every schedule must get right."""

from __future__ import annotations

import itertools
import random

import pytest

from shardrt.protocols import OverlappingSchedule, Schedule
from shardrt.testing.conformance.engine import EngineFault, Fault, RecordingEngine
from shardrt.testing.conformance.training import train_beside_twin
from shardrt.testing.functions import import_path
from shardrt.testing.pool import RankPool

_BUCKETS = 4
_each_count = pytest.mark.parametrize("buckets", [0, 1, 2, 7])
_each_bucket = pytest.mark.parametrize("bucket", range(_BUCKETS))


class ScheduleConformance:
    """Subclass it in a test module as ``class TestMine(ScheduleConformance)`` and say how to make yours.

    Needs the fixture ``ranks`` of :mod:`shardrt.testing.pytest_plugin`.

    Example:
        >>> from shardrt.testing import ScheduleConformance
        >>> class OneByOne:
        ...     name = "one-by-one"
        ...     bucket_mb = 25.0
        ...     def step(self, engine):
        ...         for bucket in range(engine.bucket_count):
        ...             engine.reduce(bucket).wait()
        ...         engine.update()
        ...         for bucket in range(engine.bucket_count):
        ...             engine.gather(bucket).wait()
        >>> class TestOneByOne(ScheduleConformance):
        ...     @classmethod
        ...     def make(cls):
        ...         return OneByOne()
        >>> TestOneByOne().test_complete_step(buckets=3)
    """

    @classmethod
    def make(cls) -> Schedule:
        """A new instance of the schedule under test."""
        raise NotImplementedError("a conformance class must say how to make its schedule: override make()")

    def test_is_a_schedule(self) -> None:
        """It has the attributes of the protocol."""
        schedule = self.make()
        assert isinstance(schedule, Schedule)
        assert isinstance(schedule.name, str)
        assert schedule.bucket_mb is None or schedule.bucket_mb > 0

    @_each_count
    def test_complete_step(self, buckets: int) -> None:
        """Every bucket is reduced, then updated, then gathered, once each; nothing is left under way."""
        schedule = self.make()
        for in_backward, apart in itertools.product((0, buckets // 2, buckets), (True, False)):
            engine = RecordingEngine(bucket_count=buckets, gathers_apart=apart)
            _backward(schedule, engine, in_backward)
            schedule.step(engine)
            engine.read_everything()
            for kind in ("reduce", "reduce done", "update", "gather", "gather done"):
                assert sorted(bucket for event, bucket in engine.events if event == kind) == list(range(buckets)), kind
            for bucket in range(buckets):
                places = [engine.events.index((kind, bucket)) for kind in ("reduce done", "update", "gather")]
                assert places == sorted(places)
            assert engine.outstanding() == []

    @pytest.mark.parametrize("apart", [True, False], ids=["two-communicators", "one-communicator"])
    @_each_count
    def test_order_does_not_depend_on_time(self, buckets: int, apart: bool) -> None:
        """Ranks are never equally fast, nor fill their buckets alike, yet must make their calls in one order."""
        orders = []
        for rank in range(8):
            schedule = self.make()
            engine = RecordingEngine(bucket_count=buckets, gathers_apart=apart, delays=random.Random(rank))
            _backward(schedule, engine, rank % (buckets + 1))
            schedule.step(engine)
            orders.append(_orders(schedule, engine))
        assert all(order == orders[0] for order in orders)

    @_each_bucket
    @pytest.mark.parametrize("place", ["reduce", "reduce wait", "gather", "gather wait"])
    def test_errors_pass_through(self, place: Fault, bucket: int) -> None:
        """An error reaches the caller as it is, and only after everything under way has been waited for."""
        engine = self._step_with_fault(place, bucket)
        assert (("update", bucket) in engine.events) == place.startswith("gather")

    def test_error_in_update(self) -> None:
        """Nothing is gathered from an update that failed."""
        engine = self._step_with_fault("update", -1)
        assert all(kind != "gather" for kind, _ in engine.issued())

    def test_works_again_after_an_error(self) -> None:
        """A schedule keeps nothing of a step that failed."""
        schedule = self.make()
        with pytest.raises(EngineFault):
            schedule.step(RecordingEngine(bucket_count=_BUCKETS, fault=("reduce", 1)))
        engine, fresh = RecordingEngine(bucket_count=_BUCKETS), RecordingEngine(bucket_count=_BUCKETS)
        schedule.step(engine)
        self.make().step(fresh)
        assert _orders(schedule, engine) == _orders(schedule, fresh)

    def test_serves_several_optimizers(self) -> None:
        """What is under way for one engine is not mixed up with another's."""
        schedule = self.make()
        engines = [RecordingEngine(bucket_count=_BUCKETS) for _ in range(2)]
        for engine in engines:
            _backward(schedule, engine, _BUCKETS)
        for engine in engines:
            schedule.step(engine)
            assert len(engine.issued()) == 2 * _BUCKETS and engine.outstanding() == []

    @pytest.mark.parametrize("partitioner", ["greedy", "flat"])
    @pytest.mark.parametrize("bucket_mb", [None, 0.004], ids=["own-buckets", "small-buckets"])
    @pytest.mark.parametrize("world_size", [2, 3])
    def test_trains_as_unsharded(
        self, ranks: RankPool, world_size: int, bucket_mb: float | None, partitioner: str
    ) -> None:
        """A real run ends every step at the parameters of an unsharded twin, with one bucket and with several."""
        kit = import_path(type(self))
        found = ranks.run(train_beside_twin, ranks=world_size, kit=kit, partitioner=partitioner, bucket_mb=bucket_mb)
        assert len(set(found)) == 1
        assert bucket_mb is None or found[0] > 1

    def _step_with_fault(self, place: Fault, bucket: int) -> RecordingEngine:
        for apart in (False, True):
            engine = RecordingEngine(
                bucket_count=_BUCKETS, gathers_apart=apart, delays=random.Random(bucket), fault=(place, bucket)
            )
            with pytest.raises(EngineFault):
                self.make().step(engine)
                engine.read_everything()
            assert engine.outstanding() == []
        return engine


def _backward(schedule: Schedule, engine: RecordingEngine, buckets: int) -> None:
    """Fill the first buckets during backward, for a schedule that listens."""
    if isinstance(schedule, OverlappingSchedule):
        for bucket in range(buckets):
            schedule.bucket_ready(engine, bucket)


def _orders(schedule: Schedule, engine: RecordingEngine) -> list[list[tuple[str, int]]]:
    """The calls of each communicator, in order."""
    apart = isinstance(schedule, OverlappingSchedule) and schedule.gathers_apart and engine.gathers_apart
    kinds = (("reduce",), ("gather",)) if apart else (("reduce", "gather"),)
    return [[call for call in engine.issued() if call[0] in some] for some in kinds]

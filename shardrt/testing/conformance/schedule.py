"""What every schedule must get right."""

from __future__ import annotations

import random

import pytest

from shardrt.protocols import Schedule
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
        """Every bucket is reduced once before the one update and gathered once after it; nothing is left under way."""
        schedule = self.make()
        for _ in range(3):
            engine = RecordingEngine(bucket_count=buckets)
            schedule.step(engine)
            everyone = list(range(buckets))
            assert [event for event in engine.events if event[0] == "update"] == [("update", -1)]
            assert sorted(bucket for kind, bucket in engine.issued() if kind == "reduce") == everyone
            assert sorted(bucket for kind, bucket in engine.issued() if kind == "gather") == everyone
            update = engine.events.index(("update", -1))
            assert sorted(bucket for kind, bucket in engine.events[:update] if kind == "reduce done") == everyone
            assert all(kind != "gather" for kind, _ in engine.events[:update])
            assert engine.outstanding() == []

    @_each_count
    def test_order_does_not_depend_on_time(self, buckets: int) -> None:
        """Ranks are never equally fast, yet must make their collective calls in one order."""
        orders = []
        for rank in range(8):
            engine = RecordingEngine(bucket_count=buckets, delays=random.Random(rank))
            self.make().step(engine)
            orders.append(engine.issued())
        assert all(order == orders[0] for order in orders)

    @_each_bucket
    @pytest.mark.parametrize("place", ["reduce", "reduce wait", "gather", "gather wait"])
    def test_errors_pass_through(self, place: Fault, bucket: int) -> None:
        """An error reaches the caller as it is, and only after everything under way has been waited for."""
        engine = self._step_with_fault(place, bucket)
        updates = [event for event in engine.events if event[0] == "update"]
        assert len(updates) == (0 if place.startswith("reduce") else 1)

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
        assert engine.events == fresh.events

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
        engine = RecordingEngine(bucket_count=_BUCKETS, delays=random.Random(bucket), fault=(place, bucket))
        with pytest.raises(EngineFault):
            self.make().step(engine)
        assert engine.outstanding() == []
        return engine

"""In which order `priority` updates and gathers, told from what has arrived."""

from __future__ import annotations

from collections.abc import Collection

import attrs
from shardrt_priority import PrioritySchedule

from shardrt.comm.waiting import has_arrived
from shardrt.comm.works import FinishedWork, FollowedWork, HandedOverWork
from shardrt.testing.conformance.engine import RecordedWork, RecordingEngine


@attrs.define(eq=False)
class Told(RecordingEngine):
    """One whose reductions say whether they have arrived."""

    late: Collection[int] = ()

    def reduce(self, bucket: int) -> RecordedWork:
        work = super().reduce(bucket)
        work.arrived = bucket not in self.late
        return work


def _events(late: Collection[int]) -> list[tuple[str, int]]:
    engine = Told(bucket_count=5, late=late)  # read in the order 1, 3, 0, 2, 4
    PrioritySchedule().step(engine)
    assert engine.issued()[5:] == [("gather", bucket) for bucket in (1, 3, 0, 2, 4)]
    assert not engine.outstanding()
    return [event for event in engine.events[5:] if event[0] in ("update", "gather")]


def test_what_is_read_first_goes_first() -> None:
    assert _events(late=()) == [(kind, bucket) for bucket in (1, 3, 0, 2, 4) for kind in ("update", "gather")]


def test_while_the_first_is_awaited_the_rest_is_updated_from_the_end() -> None:
    assert [bucket for kind, bucket in _events(late=(1, 3)) if kind == "update"] == [4, 2, 0, 1, 3]


def test_nothing_is_updated_out_of_turn_where_nobody_says_what_has_arrived() -> None:
    assert [bucket for kind, bucket in _events(late=range(5)) if kind == "update"] == [1, 3, 0, 2, 4]


def test_works_that_talk_to_other_ranks_never_say_that_they_have_arrived() -> None:
    work = FollowedWork([FinishedWork()], then=lambda: None, talks=True)
    assert not has_arrived(work)
    work.wait()
    assert has_arrived(work)


def test_a_work_handed_over_has_arrived_with_both_parts() -> None:
    late = FollowedWork([FinishedWork()], talks=True)
    work = HandedOverWork(FinishedWork(), [late])
    assert not has_arrived(work)
    work.wait()
    assert has_arrived(work)

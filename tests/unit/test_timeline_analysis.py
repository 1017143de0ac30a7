"""From spans to figures: known cases, and a twin that looks at every microsecond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrt.errors import ConfigError
from shardrt.timeline.analysis import Figures, analyse, chosen_steps, notes_on, step_windows, total
from shardrt.timeline.reading import RankTimeline, Span

MAIN = "MainThread"


def timeline(*spans: Span, rank: int = 0, world_size: int = 1, dropped: int = 0) -> RankTimeline:
    return RankTimeline(
        rank=rank,
        world_size=world_size,
        host="here",
        runtime=1,
        about={},
        dropped=dropped,
        spans=tuple(sorted(spans, key=lambda span: span.start)),
        path=Path(f"timeline-rank{rank}.json"),
    )


def span(lane: str, name: str, start: int, end: int, thread: str = MAIN, **details: Any) -> Span:
    return Span(lane, name, start, end, thread, details)


def test_a_synchronous_step_hides_nothing() -> None:
    [found] = analyse(
        timeline(
            span("trainer", "forward and backward", 0, 50),
            span("trainer", "step", 50, 100),
            span("reduce", "reduce_scatter", 51, 70, "shardrt-gloo-0"),
            span("trainer", "wait", 52, 70),
            span("update", "update", 71, 80),
            span("gather", "all_gather", 82, 99, "shardrt-gloo-0"),
        )
    ).figures
    assert found == Figures(steps=1, duration=100, communication=36, reduce=19, gather=17, waited=50 - 9, exposed=36)
    assert found.hidden == 0.0


def test_updates_in_the_same_thread_hide_and_those_of_other_threads_do_not() -> None:
    spans = [
        span("trainer", "backward", 0, 10),
        span("trainer", "step", 10, 30),
        span("gather", "all_gather", 10, 30, "shardrt-gloo-0"),
    ]
    [same] = analyse(timeline(*spans, span("update", "update", 15, 25))).figures
    [other] = analyse(timeline(*spans, span("update", "update", 15, 25, "shardrt-interleaved"))).figures
    assert (same.exposed, other.exposed) == (10, 20)


def test_waits_count_wherever_they_are_and_our_own_threads_do_not_wait() -> None:
    [found] = analyse(
        timeline(
            span("trainer", "forward", 0, 40),
            span("gather", "all_gather", 0, 20, "shardrt-gloo-1"),
            span("reduce", "reduce_scatter", 15, 30, "shardrt-gloo-0"),
            span("trainer", "wait", 5, 8),
            span("update", "wait", 0, 30, "shardrt-interleaved"),
            span("trainer", "step", 40, 41),
        )
    ).figures
    assert (found.communication, found.waited, found.exposed) == (30, 4, 3)
    assert found.hidden == pytest.approx(0.9)


def test_nothing_to_hide() -> None:
    [found] = analyse(timeline(span("trainer", "backward", 0, 4), span("trainer", "step", 4, 5))).figures
    assert found.hidden is None and found.to_json()["hidden"] is None


def test_steps_are_told_apart() -> None:
    steps = [span("trainer", "step", 10 * index, 10 * index + 2) for index in range(1, 4)]
    setup = span("other", "broadcast", 0, 3)
    assert step_windows([setup, *steps]) == [(0, 12), (12, 22), (22, 32)]
    assert step_windows([setup, span("trainer", "backward", 5, 9), *steps])[0] == (5, 12)
    assert step_windows([setup, *steps, span("trainer", "forward and backward", 12, 20)])[0] == (10, 12)
    assert step_windows([setup]) == []


def test_optimizers_that_step_one_after_the_other_make_one_step() -> None:
    steps = [span("trainer", "step", 10 * index, 10 * index + 2, number=1 + index // 2) for index in range(6)]
    assert step_windows(steps) == [(0, 12), (12, 32), (32, 52)]


def test_without_steps_the_whole_recording_is_looked_at() -> None:
    found = analyse(timeline(span("reduce", "reduce_scatter", 10, 20), span("trainer", "wait", 12, 30)))
    assert not found.has_steps and found.windows == ((10, 30),)
    assert found.over(1, 1) == Figures(duration=20, communication=10, reduce=10, waited=18, exposed=8)
    assert chosen_steps([found], None) == (1, 1)
    with pytest.raises(ConfigError, match="no steps were recorded on some rank"):
        chosen_steps([found], (1, 2))
    nothing = analyse(timeline())
    assert (nothing.figures, nothing.over(1), chosen_steps([nothing], None)) == ((), Figures(), (1, 1))


def three_steps(rank: int = 0, shift: int = 0, count: int = 3) -> RankTimeline:
    steps = [span("trainer", "step", shift + 10 * index, shift + 10 * index + 2) for index in range(count)]
    return timeline(*steps, rank=rank, world_size=2)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [(None, (2, 3)), ((None, None), (1, 3)), ((2, None), (2, 3)), ((None, 2), (1, 2)), ((3, 3), (3, 3))],
)
def test_choosing_steps(wanted: Any, expected: tuple[int, int]) -> None:
    assert chosen_steps([analyse(three_steps())], wanted) == expected


@pytest.mark.parametrize("wanted", [(3, 2), (4, None), (None, 4), (1, 9)])
def test_steps_that_are_not_there(wanted: Any) -> None:
    with pytest.raises(ConfigError, match=r"steps .* are not there; every rank has steps 1 to 3"):
        chosen_steps([analyse(three_steps())], wanted)


def test_notes() -> None:
    complete = [analyse(three_steps()), analyse(three_steps(rank=1))]
    assert notes_on(complete) == []
    assert notes_on(complete[1:]) == ["The run had 2 ranks; no file of: 0."]
    assert "different numbers of steps" in notes_on([complete[0], analyse(three_steps(1, count=2))])[0]
    assert "did not record at the same time" in notes_on([complete[0], analyse(three_steps(1, shift=1000))])[0]
    assert "No steps" in notes_on([complete[0], analyse(timeline(span("other", "x", 0, 20), rank=1, world_size=2))])[0]
    dropped = analyse(timeline(span("trainer", "step", 0, 1), dropped=1234))
    assert notes_on([dropped])[0].startswith("1,234 spans came after the limit")


KINDS = st.sampled_from(
    [
        ("trainer", "step"),
        ("trainer", "wait"),
        ("trainer", "forward"),
        ("update", "update"),
        ("update", "wait"),
        ("reduce", "reduce_scatter"),
        ("gather", "all_gather"),
        ("other", "all_reduce"),
    ]
)
SPANS = st.lists(
    st.builds(
        lambda kind, start, wide, thread: span(*kind, start, start + wide, thread),
        KINDS,
        st.integers(0, 60),
        st.integers(0, 20),
        st.sampled_from([MAIN, "other"]),
    ),
    max_size=20,
)


def at(spans: list[Span], moment: int, lane: str, *names: str, thread: str | None = None) -> bool:
    return any(
        one.lane == lane
        and (not names or one.name in names)
        and one.start <= moment < one.end
        and thread in (None, one.thread)
        for one in spans
    )


@given(SPANS)
def test_figures_equal_a_twin_that_looks_at_every_moment(spans: list[Span]) -> None:
    found = analyse(timeline(*spans))
    for (start, end), figures in zip(found.windows, found.figures, strict=True):
        twin = {"communication": 0, "reduce": 0, "gather": 0, "waited": 0, "exposed": 0}
        for moment in range(start, end):
            moving = any(at(spans, moment, lane) for lane in ("reduce", "gather", "other"))
            waiting = at(spans, moment, "trainer", "wait") or any(
                at(spans, moment, "trainer", "step", thread=thread)
                and not at(spans, moment, "update", "update", thread=thread)
                for thread in (MAIN, "other")
            )
            twin["communication"] += moving
            twin["reduce"] += at(spans, moment, "reduce")
            twin["gather"] += at(spans, moment, "gather")
            twin["waited"] += waiting
            twin["exposed"] += moving and waiting
        assert figures == Figures(steps=int(found.has_steps), duration=end - start, **twin)
    whole = total(found.figures)
    assert whole.hidden is None or 0 <= whole.hidden <= 1

"""A run under torchrun loses a rank and goes on from the last committed checkpoint, then with fewer and more ranks.

The whole story takes a minute and a half, so it is a long test; one restart is always run, in ``test_restarts.py``.
"""

from __future__ import annotations

import pytest

from tests.ranks.elastic_runs import LOSE_AT, PHASES, SAVE_EVERY, TOLERANCE, Attempt, Story, attempts_in, run_elastic


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return run_elastic(tmp_path_factory.mktemp("elastic"))


@pytest.mark.long
def test_every_attempt_goes_on_from_the_last_committed_checkpoint(story: Story) -> None:
    last_before = (LOSE_AT // SAVE_EVERY) * SAVE_EVERY
    (_, a), (_, b), (_, c) = PHASES
    assert story.attempts == (
        Attempt(ranks=4, restarts=0, first=0, committed=(3, last_before), ended=None),
        Attempt(ranks=4, restarts=1, first=last_before, committed=(9, a), ended=a),
        Attempt(ranks=2, restarts=0, first=a, committed=(12, 15, b), ended=b),
        Attempt(ranks=3, restarts=0, first=b, committed=(18, c), ended=c),
    )


@pytest.mark.long
def test_the_result_is_that_of_a_run_without_interruption(story: Story) -> None:
    assert story.difference <= TOLERANCE


@pytest.mark.long
def test_only_the_last_checkpoints_are_kept(story: Story) -> None:
    assert story.kept == (18, PHASES[-1][1])


def test_the_diary_is_read_attempt_by_attempt() -> None:
    began = {"what": "began", "ranks": 2, "restarts": 0, "step": 0}
    diary = [began, {"what": "committed", "step": 3}, {**began, "restarts": 1, "step": 3}, {"what": "ended", "step": 5}]
    assert attempts_in(diary) == (
        Attempt(ranks=2, restarts=0, first=0, committed=(3,), ended=None),
        Attempt(ranks=2, restarts=1, first=3, committed=(), ended=5),
    )

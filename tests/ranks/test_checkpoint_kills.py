"""A rank that is killed costs at most the steps since the last checkpoint, whenever it happens."""

from __future__ import annotations

import pytest

from shardrt.testing import RankPool
from tests import acceptance_damage
from tests.ranks.crashing import PHASES, Point
from tests.ranks.kill_series import Kill, choose_points, judge, references, run_kills


def test_the_next_start_finds_the_old_or_the_new_checkpoint(ranks: RankPool) -> None:
    reference = references(ranks, world_sizes=(2,))
    points = [kill for kill in choose_points(reference, len(PHASES), seed=1) if kill.point.phase in SAMPLE]
    verdicts = run_kills(ranks, points, reference, at_once=len(points), done=lambda verdict: None)
    assert [verdict.kill.point.phase for verdict in verdicts if verdict.problems] == [], verdicts
    assert len(verdicts) == len(SAMPLE)


SAMPLE = (
    "step",
    "shard, bytes",
    "manifest, before its rename",
    "manifest, after its rename",
    "removing files",
)


def test_the_judge_finds_a_run_that_went_on_from_something_else() -> None:
    kill = Kill(
        number=0, ranks=2, victim=1, asynchronous=False, point=Point(phase="shard, bytes", at=2, call=0, how="before")
    )
    whole = {"digests": {str(step): "right" for step in range(10)}}
    lost, died = {"status": "error", "ours": True}, {"status": "SIGKILL"}

    def resumed(found: int, digest: str = "right") -> dict[str, object]:
        digests = {str(step): digest for step in range(found, 10)}
        return {"status": "ok", "value": {"found": found, "digests": digests, "complete": [6, 8], "all": [6, 8]}}

    def problems(first: list[dict[str, object]], second: dict[str, object]) -> int:
        return len(judge(kill, [[one, second] for one in first], [whole, whole]).problems)

    assert problems([lost, died], resumed(2)) == 0
    assert problems([lost, died], resumed(4)) == 1
    assert problems([lost, died], resumed(2, "wrong")) == 2
    assert problems([{"status": "stuck"}, died], resumed(2)) == 1
    assert problems([lost, lost], resumed(2)) == 1


@pytest.mark.long
def test_two_hundred_kills(ranks: RankPool) -> None:
    assert acceptance_damage.kills(ranks, points=200)

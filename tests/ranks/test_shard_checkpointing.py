"""torch.utils.checkpoint with use_reentrant=True: a backward inside backward changes nothing, and units still go."""

from __future__ import annotations

import pytest

from shardrt.testing import RankPool
from tests.ranks.sharded_checkpointing import MOST_WHOLE, WAYS, run
from tests.ranks.sharded_twins import STRATEGIES

SCHEDULES = ("sync", "bucket", "priority", "interleaved")
CASES = [(how, strategy, schedule) for how in WAYS for strategy in STRATEGIES for schedule in SCHEDULES]
ALWAYS = {
    (how, strategy, SCHEDULES[(at + place) % 4])
    for at, how in enumerate(WAYS)
    for place, strategy in enumerate(STRATEGIES)
    if strategy == "full_shard" or (at + place) % 2
} | {("shared", strategy, "bucket") for strategy in STRATEGIES}
"""Each way and each schedule at least once under every strategy; the rest is in the long series."""


@pytest.mark.parametrize(
    ("how", "strategy", "schedule"),
    [case if case in ALWAYS else pytest.param(*case, marks=pytest.mark.long) for case in CASES],
)
def test_reentrant_checkpoints_equal_the_twin(ranks: RankPool, how: str, strategy: str, schedule: str) -> None:
    for value in ranks.run(run, ranks=2, how=how, strategy=strategy, schedule=schedule):
        if how == "shared" and schedule == "interleaved":
            assert "use_reentrant=False" in value["said"]
            continue
        # A bucket that is reduced in two parts forms its sum in another order.
        assert value["difference"] <= (2e-5 if how == "shared" else 0.0), value
        assert value["most"] <= MOST_WHOLE.get(how, 3) and value["left"] == []

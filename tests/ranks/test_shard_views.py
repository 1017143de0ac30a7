"""Where ranks share memory, whole parameters are views of all ranks' shards: nobody copies, and all train the same."""

from __future__ import annotations

import pytest

from shardrt.testing import RankPool
from tests.ranks import shard_views
from tests.ranks.sharded_twins import tolerance

ROUNDING = 2e-6
"""Where three and more ranks' gradients are added in another order."""


@pytest.mark.parametrize(("schedule", "world_size"), [("sync", 2), ("bucket", 3), ("priority", 4), ("sync", 3)])
def test_views_train_as_the_twin(ranks: RankPool, schedule: str, world_size: int) -> None:
    for found in ranks.run(shard_views.train_wide, ranks=world_size, schedule=schedule):
        assert found["views"] >= 3
        assert found["difference"] <= (0.0 if world_size == 2 else ROUNDING)


@pytest.mark.parametrize("name", ["tied transformer", "called twice", "odd", "scalars"])
def test_models_of_all_kinds(ranks: RankPool, name: str) -> None:
    for found in ranks.run(shard_views.train_zoo, ranks=2, name=name, schedule="bucket"):
        assert found["moved"] > 1e-3
        assert found["difference"] <= tolerance(name, "full_shard", "adamw_foreach")


def test_nobody_updates_what_another_rank_still_reads(ranks: RankPool) -> None:
    for found in ranks.run(shard_views.train_late, ranks=3):
        assert found["views"] > 0
        assert found["difference"] == 0.0


def test_what_a_forward_writes_stays_on_its_rank_and_goes(ranks: RankPool) -> None:
    for found in ranks.run(shard_views.scribble, ranks=2):
        assert found == {"views": 1, "differences": [0.0] * 4}


def test_updates_inside_backward_and_ranks_without_room_copy(ranks: RankPool) -> None:
    for options in ({"schedule": "interleaved"}, {"schedule": "sync", "lacking": 1}, {"backend": "gloo"}):
        for found in ranks.run(shard_views.train_wide, ranks=2, **{"schedule": "sync", **options}):
            assert found == {"views": 0, "difference": 0.0}


def test_ranks_with_uneven_inputs_copy(ranks: RankPool) -> None:
    options = {"batches": [0, 3], "parts": 2, "evaluates": True, "schedule": "bucket"}
    for found in ranks.run(shard_views.train_uneven, ranks=2, **options):
        assert found["difference"] <= 2e-5 and found["steps"] == 7


def test_a_model_may_be_dropped_while_another_rank_computes_with_it(ranks: RankPool) -> None:
    assert ranks.run(shard_views.drop_early, ranks=2) == [0.0, 0.0]


def test_a_rank_may_step_without_a_backward_of_its_own(ranks: RankPool) -> None:
    for found in ranks.run(shard_views.skip_backward, ranks=2):
        assert found["views"] > 0
        assert found["difference"] <= ROUNDING


def test_evaluation_goes_on_after_an_error_of_one_rank(ranks: RankPool) -> None:
    assert ranks.run(shard_views.raise_in_evaluation, ranks=2) == [0.0, 0.0]


def test_shards_that_an_optimizer_of_torchs_steps_are_copied(ranks: RankPool) -> None:
    assert ranks.run(shard_views.views_of_compat, ranks=2, init="gloo") == [0, 0]

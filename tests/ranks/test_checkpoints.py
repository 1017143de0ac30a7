"""A run is saved by some ranks and goes on with others, with the same state and the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardrt.testing import RankPool
from tests.ranks.keeping import difference, load_run, save_run

TOLERANCE = 5e-5
"""After 20 further steps at another number of ranks, which add the same gradients up in another order."""
STEPS = 5

ANYTHING_TO_ANYTHING: list[tuple[int, dict[str, Any], int, dict[str, Any]]] = [
    (1, {}, 2, {"partitioner": "flat"}),
    (2, {"partitioner": "flat", "schedule": "priority"}, 1, {}),
    (2, {"partitioner": "greedy"}, 2, {"partitioner": "greedy"}),
    (2, {"partitioner": "flat", "schedule": "interleaved"}, 2, {"partitioner": "flat", "schedule": "interleaved"}),
    (3, {"partitioner": "bucket", "bucket_mb": 0.001}, 4, {"partitioner": "flat", "schedule": "bucket"}),
    (4, {"partitioner": "flat"}, 3, {"partitioner": "greedy", "schedule": "interleaved"}),
    (2, {"backend": "reference", "partitioner": "flat"}, 4, {"partitioner": {"name": "bucket", "split": False}}),
]


@pytest.mark.parametrize("cell", ANYTHING_TO_ANYTHING, ids=lambda cell: f"{cell[0]}-{cell[1]}-{cell[2]}-{cell[3]}")
def test_a_run_goes_on_with_other_ranks(ranks: RankPool, tmp_path: Path, cell: Any) -> None:
    before, how, after, otherwise = cell
    saved = ranks.run(save_run, ranks=before, path=str(tmp_path), steps=STEPS, optimizer="adamw_foreach", runtime=how)
    loaded = ranks.run(
        load_run, ranks=after, path=str(tmp_path), steps=STEPS, optimizer="adamw_foreach", runtime=otherwise
    )
    for one in loaded:
        assert one["loaded"] == saved[0]["saved"]
        if before == after:
            assert one["final"] == saved[0]["final"]
        assert difference(one["parameters"], saved[0]["parameters"]) <= TOLERANCE


@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adam", "adamw_fused", "adafactor", "muon", "lion_third_party"])
def test_every_kind_of_state_survives(ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    call = {"path": str(tmp_path), "steps": STEPS, "optimizer": optimizer}
    saved = ranks.run(save_run, ranks=3, runtime={}, **call)
    loaded = ranks.run(load_run, ranks=2, runtime={}, **call)
    assert loaded[0]["loaded"] == loaded[1]["loaded"] == saved[0]["saved"]
    assert difference(loaded[0]["parameters"], saved[0]["parameters"]) <= TOLERANCE


def test_a_save_behind_the_training_has_the_state_of_its_call(ranks: RankPool, tmp_path: Path) -> None:
    call = {"path": str(tmp_path), "steps": STEPS, "optimizer": "adam", "runtime": {"partitioner": "flat"}}
    saved = ranks.run("tests.ranks.test_checkpoints:save_behind", ranks=2, **call)
    loaded = ranks.run(load_run, ranks=2, **call)
    assert loaded[0]["loaded"] == saved[0]["saved"]
    assert loaded[0]["final"] == saved[0]["final"]


def save_behind(path: str, steps: int, optimizer: str, runtime: dict[str, Any]) -> dict[str, Any]:
    import shardrt
    from tests.ranks.keeping import Run

    with shardrt.Runtime(timeout=30, **runtime) as rt:
        run = Run(rt, optimizer)
        run.train(0, steps)
        saved = run.digests()
        saving = run.save(path, asynchronous=True)
        run.train(steps, steps + 20)
        saving.wait()
        return {"saved": saved, "final": run.digests(), "path": saving.path}

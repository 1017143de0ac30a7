"""Shared memory: gloo's bits, memory that goes back, who is let in, and ranks that are lost, stopped or elsewhere."""

from __future__ import annotations

import os

import pytest

from shardrt.testing import RankPool
from tests.ranks import shm_losses, shm_runs
from tests.ranks.sharded_twins import compare_sharded, tolerance
from tests.ranks.twins import compare

DTYPES = ["float32", "bfloat16", "float64", "int64", "complex64", "bool"]


@pytest.mark.parametrize("shared", [False, True], ids=["through-slots", "in-shared-memory"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_are_gloos(ranks: RankPool, dtype: str, shared: bool) -> None:
    found = ranks.run(shm_runs.same_bits, ranks=4, init="gloo", dtype_name=dtype, shared=shared)
    assert found == [[]] * 4


def test_memory_goes_back_with_the_last_tensor_and_the_communicator(ranks: RankPool) -> None:
    for found in ranks.run(shm_runs.memory_goes_back, ranks=2, init="gloo"):
        assert found["areas"] > 0
        assert (found["tensor"], found["view"], found["after"]) == (2**22, 2**22, 0)
        assert found["refused"] and found["again"] == 0


def test_a_runtime_is_gone_though_a_peer_still_reads(ranks: RankPool) -> None:
    first, second = ranks.run(shm_runs.close_before_a_late_reader, ranks=2, init="gloo")
    assert first["waits"] and not first["kept"]  # what the peer reads stays, and nothing else
    assert second["read"] == [0.0] * 4 and not second["kept"]


def test_peers_hear_of_an_operation_before_its_thread_is_woken(ranks: RankPool) -> None:
    for found in ranks.run(shm_runs.begun_by_callers, ranks=3, init="gloo"):
        # Counted as ready by the time it is queued: one slot, all steps of what lies in shared memory, a barrier.
        assert found == {"all_reduce": 1, "in place": 5, "barrier": 1, "many slots": 0, "behind another": 0}


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["sync", "priority"])
def test_an_optimizer_trains_as_its_twin(ranks: RankPool, schedule: str, world_size: int) -> None:
    runtime = {"backend": "shm", "schedule": schedule, "partitioner": "flat", "bucket_mb": 0.001}
    for found in ranks.run(compare, ranks=world_size, optimizer="adamw_foreach", steps=10, runtime=runtime):
        assert found["moved"] > 1e-3
        assert found["difference"] <= (0.0 if world_size == 2 else 2e-6)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("strategy", ["shard_grad_op", "full_shard"])
def test_a_sharded_module_trains_as_its_twin(ranks: RankPool, strategy: str, world_size: int) -> None:
    options = {"name": "odd", "strategy": strategy, "steps": 10, "runtime": {"backend": "shm"}}
    for found in ranks.run(compare_sharded, ranks=world_size, **options):
        assert found["moved"] > 1e-3
        assert found["difference"] <= tolerance("odd", strategy, "adamw_foreach")


def test_other_calls_are_told_apart_at_once(ranks: RankPool) -> None:
    for found in ranks.run(shm_runs.different_calls, ranks=3, init="gloo"):
        assert "CommunicationError" in found
        assert "'all_gather of 12 float32 in runs" in found and "'broadcast of 12 float32, source 0'" in found


def test_auto_takes_it_where_all_ranks_share_a_host(ranks: RankPool) -> None:
    for found in ranks.run(shm_losses.choose, ranks=3, init=None, how=""):
        assert (found["backend"], found["sum"]) == ("shm", 6.0)
        assert found["reason"].startswith("auto chose shm for cpu with 3 ranks: priority 200, before gloo (100)")


ELSEWHERE = {
    "another host": "runs on another host (host",
    "another container": "runs in another pid namespace",
    "another user": "runs as another user (user",
    "another file": "is no file of shared memory",
    "no room": "rank 2 says: there is no room",
}


@pytest.mark.parametrize("how", ELSEWHERE)
def test_auto_takes_gloo_on_all_ranks_where_one_is_elsewhere(ranks: RankPool, how: str) -> None:
    for found in ranks.run(shm_losses.choose, ranks=3, init=None, how=how):
        assert (found["backend"], found["sum"]) == ("gloo", 6.0)
        assert "auto chose gloo for cpu with 3 ranks: " in found["reason"]
        assert "shm unavailable: rank " in found["reason"] and ELSEWHERE[how] in found["reason"]
        assert "fix: use gloo" in found["reason"]


def test_by_name_it_is_refused_on_all_ranks_where_one_is_elsewhere(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(shm_losses.choose, ranks=3, init=None, how="another host", backend="shm"):
        assert outcome.error_type == "BackendUnavailableError", outcome
        assert "backend 'shm' (device cpu) is unavailable: rank 0 says: rank 2 runs on another host" in (
            outcome.error_message
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_nobody_else_is_let_in(ranks: RankPool) -> None:
    [found] = ranks.run(shm_losses.permissions, ranks=1, init=None)
    assert found["mode"] == "0o600" and found["links"] == 0
    assert found["other user"] == "PermissionError" and found["shrinking"] == "PermissionError"
    assert found["name"] == "/memfd:shardrt (deleted)" and found["still there"]


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 5))])
def test_a_killed_rank_is_an_error_and_leaves_nothing(ranks: RankPool, seed: int) -> None:
    """A hundred of them are in ``python tasks.py accept shm``."""
    before = shm_losses.leftovers()
    victim, outcomes = shm_losses.kill_one(ranks, seed)
    assert shm_losses.verdict(victim, outcomes) == ""
    assert shm_losses.leftovers() <= before


def test_a_rank_killed_during_operations_is_named_soon(ranks: RankPool) -> None:
    outcomes = ranks.outcomes(
        shm_losses.killed_at,
        ranks=3,
        timeout=90,
        grace=60,
        init=None,
        seconds=0.2,
        victim=1,
        dice_seed=3,
        after="operations",
    )
    assert shm_losses.verdict(1, outcomes) == ""
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.value["phase"] == "operations"
        if "PeerError" not in outcome.value["error"]:
            assert "from rank 1 failed after" in outcome.value["error"] and "has ended" in outcome.value["error"]


def test_a_stopped_rank_is_named_within_the_timeout(ranks: RankPool) -> None:
    outcomes = ranks.outcomes(
        shm_losses.killed_at,
        ranks=3,
        timeout=90,
        grace=60,
        init=None,
        seconds=0.2,
        victim=1,
        dice_seed=4,
        after="operations",
        signals="SIGSTOP",
    )
    assert shm_losses.verdict(1, outcomes) == ""
    told = [outcome.value["error"] for outcome in (outcomes[0], outcomes[2])]
    assert any("rank 1, whose process is stopped (SIGSTOP or a debugger), is stuck" in error for error in told), told

"""Availability: refusals with reason and fix, and what ``auto`` chooses and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardrt import Availability, BackendRecord
from shardrt.comm import choose_backend, require_available
from shardrt.errors import BackendUnavailableError


def record(name: str, device_type: str = "cpu", priority: int = 10, **more: Any) -> BackendRecord:
    return BackendRecord(
        name=name, device_type=device_type, priority=priority, summary=f"{name} wires", factory=object, **more
    )


def never(reason: str, fix: str = "wait") -> Callable[[], Availability]:
    return lambda: Availability.no(reason, fix=fix)


def must_not_be_asked() -> Availability:
    raise AssertionError("this backend was probed although nothing depends on its answer")


def test_an_available_backend_passes() -> None:
    require_available(record("gloo"))


def test_an_unavailable_backend_says_why_and_what_helps() -> None:
    with pytest.raises(BackendUnavailableError) as refusal:
        require_available(record("nccl", "cuda", probe=never("this torch build has no NCCL", "install another")))
    assert str(refusal.value) == (
        "backend 'nccl' (device cuda) is unavailable: this torch build has no NCCL; fix: install another"
    )


def test_auto_takes_the_highest_priority_that_is_available() -> None:
    records = [
        record("gloo", priority=10, probe=must_not_be_asked),
        record("fast", priority=90, probe=never("no wires")),
        record("shm", priority=50),
    ]
    chosen, reason = choose_backend(records, "cpu", 2)
    assert chosen.name == "shm"
    assert reason == (
        "auto chose shm for cpu with 2 ranks: priority 50, before gloo (10); fast unavailable: no wires; fix: wait"
    )
    assert "\n" not in reason


def test_auto_looks_at_the_device_and_at_records_for_any() -> None:
    records = [record("gloo"), record("nccl", "cuda", 100), record("anything", "*", 5)]
    assert choose_backend(records, "cpu", 2)[0].name == "gloo"
    assert choose_backend(records, "cuda", 2)[0].name == "nccl"
    chosen, reason = choose_backend(records, "xpu", 1)
    assert chosen.name == "anything"
    assert reason == (
        "auto chose anything for xpu with 1 rank: the only one that fits; "
        "nccl not considered: for cuda; gloo not considered: for cpu"
    )


def test_auto_keeps_to_world_sizes_and_leaves_out_what_is_only_taken_by_name() -> None:
    records = [
        record("null", "*", 200, world_sizes=(1, 1), probe=Availability.yes),
        record("reference", "*", 0, probe=must_not_be_asked),
        record("many", "cpu", 150, world_sizes=(4, None), probe=Availability.yes),
        record("gloo"),
    ]
    assert choose_backend(records, "cpu", 1)[0].name == "null"
    assert choose_backend(records, "cpu", 4)[0].name == "many"
    chosen, reason = choose_backend(records, "cpu", 2)
    assert chosen.name == "gloo"
    assert "null not considered: takes 1 to 1 ranks" in reason
    assert "many not considered: takes at least 4 ranks" in reason
    assert "reference not considered: only taken by name" in reason


def test_two_of_one_priority_are_told_apart_the_same_way_everywhere() -> None:
    pair = [record("beta"), record("alpha")]
    assert choose_backend(pair, "cpu", 2)[0].name == choose_backend(pair[::-1], "cpu", 2)[0].name == "alpha"


def test_auto_lists_every_candidate_when_none_fits() -> None:
    records = [record("nccl", "cuda", probe=never("no GPU", "plug one in")), record("gloo")]
    with pytest.raises(BackendUnavailableError) as refusal:
        choose_backend(records, "cuda", 8)
    assert str(refusal.value) == (
        "auto found no backend for cuda with 8 ranks; of those installed:\n"
        "  gloo not considered: for cpu\n"
        "  nccl unavailable: no GPU; fix: plug one in\n"
        "fix: follow one of these, or name a backend with backend=..."
    )


def test_auto_without_any_backend() -> None:
    with pytest.raises(BackendUnavailableError, match="no backend is installed"):
        choose_backend([], "cpu", 1)

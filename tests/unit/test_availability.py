"""Availability: refusals with reason and fix, and what ``auto`` chooses and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardrt import Availability, BackendRecord
from shardrt.comm import choose_backend, require_available
from shardrt.comm.asking import ask_ranks
from shardrt.comm.availability import backends_to_ask
from shardrt.comm.control import LocalControl
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


def together(name: str, priority: int = 50) -> BackendRecord:
    return record(name, priority=priority, introduce=lambda: name, suits=lambda told: Availability.yes())


def test_auto_takes_a_backend_that_all_ranks_find_suitable() -> None:
    records = [record("gloo"), together("shm")]
    assert [one.name for one in backends_to_ask(records, "cpu", 2)] == ["shm"]
    assert backends_to_ask(records, "cpu", 1) == backends_to_ask(records, "cuda", 2) == []
    yes = choose_backend(records, "cpu", 2, {("cpu", "shm"): Availability.yes()})
    assert yes[0].name == "shm" and yes[1].endswith("priority 50, before gloo (10)")
    no = choose_backend(records, "cpu", 2, {("cpu", "shm"): Availability.no("rank 1 says: far", fix="move")})
    assert no[0].name == "gloo" and no[1].endswith(
        "the only one that fits; shm unavailable: rank 1 says: far; fix: move"
    )
    unasked = choose_backend(records, "cpu", 2)
    assert unasked[0].name == "shm" and unasked[1].endswith(", if all ranks find that it suits them")


def test_whatever_a_plugin_does_when_asked_is_an_answer() -> None:
    def fail(*_: Any) -> Any:
        raise OSError("no such thing")

    asked = [
        record("mute", introduce=fail, suits=fail),
        record("moody", introduce=dict, suits=fail),
        record("odd", introduce=dict, suits=lambda told: True),
        record("absent", introduce=dict, suits=fail, probe=never("not here")),
        together("fine"),
    ]
    found = {name: (answer.ok, answer.reason) for (_, name), answer in ask_ranks(asked, LocalControl()).items()}
    assert found == {
        "mute": (False, "rank 0 says: rank 0 cannot: its introduce raised OSError: no such thing"),
        "moody": (False, "rank 0 says: its suits raised OSError: no such thing"),
        "odd": (False, "rank 0 says: its suits returned True instead of an Availability"),
        "absent": (False, "rank 0 says: rank 0 cannot: not here"),
        "fine": (True, ""),
    }


def test_introductions_need_somebody_to_judge_them() -> None:
    with pytest.raises(ValueError, match="introduce without suits"):
        record("half", introduce=dict)

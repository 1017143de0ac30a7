"""What communicators record: operations in the lane of their kind, and waits that really blocked."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardrt.comm import Capabilities, CollectiveCommunicator, OpSupport
from shardrt.comm.control import LocalControl
from shardrt.comm.thread import OperationThread
from shardrt.errors import CommunicationError
from shardrt.protocols import Group
from shardrt.timeline import Timeline


def spans(timeline: Timeline) -> list[tuple[str, str, str, Any]]:
    return [(lane, name, thread, dict(details)) for lane, name, _, _, thread, details in timeline.spans()]


@pytest.fixture
def timeline() -> Timeline:
    return Timeline(0, 1)


def test_operations_of_a_thread(timeline: Timeline) -> None:
    thread = OperationThread(name="shardrt-test", rank=0, timeout=20, control=LocalControl(), timeline=timeline)
    go = threading.Event()
    with timeline.noting(bucket=2):
        first = thread.submit("reduce_scatter (number 1)", lambda: _set_by(go), bytes=64)
    threading.Timer(0.02, go.set).start()
    first.wait()
    thread.submit("all_gather (number 2)", lambda: None).wait()
    thread.submit("barrier", lambda: None).wait()
    thread.close()
    found = [span for span in spans(timeline) if span[1] != "wait"]
    assert found == [
        ("reduce", "reduce_scatter", "shardrt-test", {"bytes": 64, "bucket": 2}),
        ("gather", "all_gather", "shardrt-test", {}),
        ("other", "barrier", "shardrt-test", {}),
    ]
    wait = ("trainer", "wait", "MainThread", {"target": "reduce_scatter (number 1)"})
    assert next(span for span in spans(timeline) if span[1] == "wait") == wait


def _set_by(event: threading.Event) -> None:
    assert event.wait(20)


def test_an_operation_that_fails_is_recorded_too(timeline: Timeline) -> None:
    thread = OperationThread(name="shardrt-test", rank=0, timeout=20, control=LocalControl(), timeline=timeline)

    def fail() -> None:
        raise CommunicationError("gone")

    with pytest.raises(CommunicationError, match="gone"):
        thread.submit("all_gather", fail).wait()
    with pytest.raises(CommunicationError, match="was not started"):
        thread.submit("all_gather", fail).wait()
    thread.close()
    assert [name for _, name, _, _ in spans(timeline) if name != "wait"] == ["all_gather"]


class Handle:
    """A torch work that takes a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def wait(self, *_: Any) -> None:
        if self.seconds < 0:
            raise RuntimeError("broken")
        time.sleep(self.seconds)


def collective(timeline: Timeline | None, seconds: float) -> CollectiveCommunicator:
    even = OpSupport(uneven=False)
    ops = SimpleNamespace(
        reduce_scatter_single=lambda *_, **__: Handle(seconds),
        all_gather_single=lambda *_, **__: Handle(seconds),
        ReduceOp=SimpleNamespace(SUM="sum"),
    )
    group = Group(
        rank=0,
        world_size=2,
        device_type="cpu",
        timeout=20.0,
        control=LocalControl(),
        process_group=object(),
        number=5,
        timeline=timeline,
    )
    return CollectiveCommunicator(group, capabilities=Capabilities(reduce_scatter=even, all_gather=even), ops=ops)


def test_collectives_last_from_their_start_to_the_end_of_the_wait(timeline: Timeline) -> None:
    communicator = collective(timeline, 0.01)
    with timeline.noting(bucket=1):
        work = communicator.reduce_scatter(torch.ones(4), [2, 2])
    time.sleep(0.02)
    work.wait()
    work.wait()
    assert spans(timeline) == [
        ("trainer", "wait", "MainThread", {"target": "reduce_scatter"}),
        ("reduce", "reduce_scatter", "MainThread", {"sent": 8, "communicator": 5, "bucket": 1}),
    ]
    [(_, _, waited_from, waited_to, _, _), (_, _, started, ended, _, _)] = timeline.spans()
    assert waited_from - started >= 0.02 and waited_to - waited_from >= 0.01 and ended == waited_to


def test_a_collective_that_fails_is_recorded_too(timeline: Timeline) -> None:
    with pytest.raises(CommunicationError, match="broken"):
        collective(timeline, -1).all_gather(torch.ones(4), [2, 2]).wait()
    assert [span[:2] for span in spans(timeline) if span[1] != "wait"] == [("gather", "all_gather")]


def test_without_a_timeline_nothing_changes() -> None:
    collective(None, 0.0).all_gather(torch.ones(4), [2, 2]).wait()

"""The ring of last operations, the heartbeat, and what is told of ranks when a wait fails."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardrt.comm import Capabilities, CollectiveCommunicator, OpSupport
from shardrt.comm.control import LocalControl
from shardrt.comm.thread import OperationThread
from shardrt.errors import CommunicationError, ConfigError, PeerError
from shardrt.flight import FlightRecorder
from shardrt.flight.heartbeat import Heartbeat, beat_key, checked_beat
from shardrt.flight.recorder import RING_SIZE, noted
from shardrt.flight.report import read_report, reports_directory
from shardrt.flight.telling import MOST_RANKS, tell_ranks
from shardrt.flight.watch import FlightWatch
from shardrt.protocols import Group


class Log:
    """Keeps events instead of printing them."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []

    def __getattr__(self, level: str) -> Any:
        return lambda event, **details: self.events.append((level, event, details))


@pytest.fixture
def flight() -> FlightRecorder:
    return FlightRecorder(rank=0, world_size=2)


def run_one(flight: FlightRecorder, number: int, error: BaseException | None = None) -> None:
    operation = flight.issue("all_gather", communicator=4096, number=number, nbytes=8)
    operation.start()
    operation.finish(error)


def test_the_ring_keeps_the_last_and_forgets_the_rest(flight: FlightRecorder) -> None:
    for number in range(1, 3 * RING_SIZE):
        run_one(flight, number)
    assert [one.number for one in flight.operations()] == list(range(2 * RING_SIZE, 3 * RING_SIZE))


def test_what_is_under_way_is_kept_however_much_is_queued_after_it(flight: FlightRecorder) -> None:
    running = flight.issue("reduce_scatter", communicator=4096, number=1)
    running.start()
    for number in range(2, 3 * RING_SIZE):
        flight.issue("all_gather", communicator=4096, number=number)
    assert flight.operations()[0] is running and len(flight.operations()) == RING_SIZE + 1
    summary = flight.summary()
    assert [one["kind"] for one in summary["under_way"]] == ["reduce_scatter"] and summary["finished"] is None
    running.finish()
    assert flight.summary()["finished"]["number"] == 1 and running not in flight.operations()


def test_states_times_and_errors(flight: FlightRecorder) -> None:
    operation = flight.issue("all_reduce", communicator=4096, number=1, nbytes=4)
    states = [operation.state]
    operation.start()
    states.append(operation.state)
    problem = CommunicationError("gone\nand more lines")
    problem.ranks = (1,)
    operation.finish(problem)
    states.append(operation.state)
    assert states == ["queued", "under way", "failed"]
    [found] = flight.to_json()
    assert found["error"] == "gone" and found["waits_for"] == [1] and found["bytes"] == 4
    assert found["issued"] <= found["started"] <= found["finished"] <= time.time() + 1
    assert abs(found["finished"] - time.time()) < 60, "by the wall clock"
    assert flight.first_failed is operation and json.dumps(flight.summary())


def test_many_threads_record_at_once(flight: FlightRecorder) -> None:
    def record(communicator: int) -> None:
        noted.bucket = communicator
        for number in range(500):
            operation = flight.issue("all_reduce", communicator=communicator, number=number)
            operation.start()
            flight.summary()
            operation.finish()

    threads = [threading.Thread(target=record, args=(communicator,)) for communicator in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = flight.operations()
    assert len(kept) == RING_SIZE and not flight.under_way
    assert [one.sequence for one in kept] == list(range(2000 - RING_SIZE, 2000))
    assert all(one.bucket == one.communicator for one in kept) and noted.bucket is None


def test_a_thread_of_operations_records_and_explains(flight: FlightRecorder) -> None:
    FlightWatch(flight, ask=lambda seconds: {}, log=Log())
    thread = OperationThread(name="shardrt-test", rank=0, timeout=20, control=LocalControl(), flight=flight)
    thread.submit("all_gather (number 1)", lambda: None, communicator=4096, number=1, bytes=8).wait()

    def fail() -> None:
        raise CommunicationError("rank 0: lost")

    failing = thread.submit("all_reduce (number 2)", fail, communicator=4096, number=2)
    after = thread.submit("all_reduce (number 3)", lambda: None, communicator=4096, number=3)
    with pytest.raises(CommunicationError) as caught:
        failing.wait()
    assert str(caught.value).splitlines() == [
        "rank 0: lost",
        "what each rank did last:",
        "  rank 0 (this one): last finished all_gather 1 of communicator 4096, "
        "all_reduce 2 of communicator 4096 failed",
        "  rank 1: never heard",
    ]
    with pytest.raises(CommunicationError, match="was not started, since an earlier operation failed: rank 0: lost\n"):
        after.wait()
    assert [(one.number, one.nbytes, one.state) for one in flight.operations()] == [
        (1, 8, "done"),
        (2, 0, "failed"),
        (3, 0, "failed"),
    ]
    thread.close()


def test_an_operation_handed_over_ends_where_it_ends(flight: FlightRecorder) -> None:
    options: dict[str, Any] = {"rank": 0, "timeout": 20, "control": LocalControl(), "flight": flight}
    first, second = (OperationThread(name=f"shardrt-{name}", **options) for name in "ab")
    go, handed = threading.Event(), threading.Event()

    def post() -> None:
        second.submit("all_reduce rest", lambda: go.wait(20) and None, record=first.hand_over())
        handed.set()

    first.submit("all_reduce (number 1)", post, communicator=4096, number=1).wait()
    assert handed.wait(20)
    assert [one.state for one in flight.operations()] == ["under way"]
    go.set()
    second.submit("barrier", lambda: None).wait()
    assert flight.operations()[0].state == "done"
    first.close()
    second.close()


class Handle:
    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def wait(self, *_: Any) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [None, RuntimeError("socket closed")])
def test_collectives_of_torch_are_recorded(flight: FlightRecorder, error: Exception | None) -> None:
    import torch

    class Ops:
        ReduceOp = dist.ReduceOp

        def all_reduce(self, *_: Any, **__: Any) -> Handle:
            return Handle(error)

        reduce_scatter_single = all_gather_single = all_reduce

    even = OpSupport(uneven=False)
    group = Group(
        rank=0,
        world_size=2,
        device_type="cpu",
        timeout=5,
        control=LocalControl(),
        process_group=object(),
        flight=flight,
    )
    comm = CollectiveCommunicator(
        group, capabilities=Capabilities(reduce_scatter=even, all_gather=even), ops=Ops(), name="double"
    )
    work = comm.all_reduce(torch.zeros(4))
    assert [one.state for one in flight.operations()] == ["under way"]
    if error is None:
        work.wait()
    else:
        with pytest.raises(CommunicationError, match="socket closed"):
            work.wait()
    [recorded] = flight.operations()
    assert (recorded.kind, recorded.number, recorded.state) == ("all_reduce", 1, "done" if error is None else "failed")


def test_the_heartbeat_speaks_listens_and_takes_its_leave() -> None:
    store = dist.HashStore()
    store.set(beat_key("x", 1), json.dumps({"time": 5.0}))
    flight = FlightRecorder(rank=0, world_size=2)
    heartbeat = Heartbeat(store, flight, prefix="x")
    deadline = time.monotonic() + 20
    while not heartbeat.heard and time.monotonic() < deadline:
        time.sleep(0.01)
    assert heartbeat.heard == {1: {"time": 5.0}}
    words = checked_beat(store.get(beat_key("x", 0)))
    assert words is not None and words["left"] is False and words["step"] == 0
    heartbeat.stop()
    assert json.loads(store.get(beat_key("x", 0)))["left"] is True


def test_a_store_that_breaks_ends_the_heartbeat_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def set(self, *_: Any) -> None:
            raise RuntimeError("connection reset")

    heartbeat = Heartbeat(Broken(), FlightRecorder(rank=0, world_size=2), prefix="x")
    heartbeat._thread.join(20)
    assert not heartbeat._thread.is_alive()
    heartbeat.stop()
    assert capfd.readouterr().err == ""


def test_a_forgotten_runtime_falls_silent() -> None:
    flight = FlightRecorder(rank=0, world_size=2)
    heartbeat = Heartbeat(dist.HashStore(), flight, prefix="x")
    thread = heartbeat._thread
    del flight, heartbeat
    thread.join(20)
    assert not thread.is_alive()


def test_errors_are_explained_once_and_reports_written_once(flight: FlightRecorder, tmp_path: Path) -> None:
    asked: list[float] = []

    def ask(seconds: float) -> dict[int, dict[str, Any]]:
        asked.append(seconds)
        return {1: {"time": time.time() - 21.3, "pid": 1, "host": "elsewhere", "under_way": []}}

    log = Log()
    watch = FlightWatch(flight, ask=ask, log=log, directory=tmp_path, about={"backend": {"name": "gloo"}})
    run_one(flight, 41)
    first, second = CommunicationError("rank 0: all_gather took too long"), PeerError("rank 0 stops")
    for error in (first, first, second):
        flight.explain(error)
    assert len(asked) == 1
    for error in (first, second):
        assert str(error).count("rank 1: silent, last heard 21.3 s ago, has finished nothing yet, none under way") == 1
    [path] = tmp_path.iterdir()
    assert read_report(path).error == "rank 0: all_gather took too long"
    assert [(level, event) for level, event, _ in log.events] == [("error", "rank.failed")]
    assert log.events[0][2] == {"error": "CommunicationError: rank 0: all_gather took too long", "report": str(path)}
    foreign = ValueError("bad batch")
    watch.explain(foreign)
    assert str(foreign) == "bad batch"


def test_trouble_with_the_report_never_hides_the_error(flight: FlightRecorder, tmp_path: Path) -> None:
    def ask(seconds: float) -> dict[int, dict[str, Any]]:
        raise CommunicationError("the store is gone")

    log = Log()
    FlightWatch(flight, ask=ask, log=log, directory=tmp_path / "not there")
    error = CommunicationError("rank 0: too long")
    flight.explain(error)
    assert str(error).startswith(
        "rank 0: too long\nwhat each rank did last:\n  rank 0 (this one): has finished nothing"
    )
    assert [event for _, event, _ in log.events] == ["ranks.unheard", "hang_report.unwritten", "rank.failed"]


def test_large_worlds_are_told_of_in_short() -> None:
    beats = {rank: {"time": 100.0 - (rank == 77) * 50} for rank in range(200)}
    lines = tell_ranks(beats, world_size=200, own=3, now=100.5)
    assert len(lines) == MOST_RANKS + 1
    assert any(line.startswith("rank 77: silent, last heard 50.5 s ago") for line in lines)
    assert any(line.startswith("rank 3 (this one)") for line in lines)
    assert lines[-1] == "and 184 more ranks, all heard in the last 0.5 s"


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDRT_HANG_DIR", str(tmp_path / "file" / "in it"))
    with pytest.raises(ConfigError, match=r"SHARDRT_HANG_DIR=.*no file can be written there"):
        reports_directory(None)
    assert reports_directory(str(tmp_path / "given")) == tmp_path / "given", "the argument wins"

"""A store whose host is stopped, and calls that would block for ever: they end in errors that say so."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardrt
from shardrt.comm.bounded import BoundedStore, within
from shardrt.comm.control import StoreControl
from shardrt.comm.meeting import meet
from shardrt.errors import CommunicationError
from shardrt.testing import RankPool
from tests.ranks.lost_ranks import wait_for_file

HOST = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hosted() -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A process that hosts a store, and a connection to it."""
    process = subprocess.Popen([sys.executable, "-c", HOST], stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    try:
        yield process, dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    finally:
        process.kill()
        process.communicate()


def test_a_store_that_is_stopped_answers_with_an_error_and_recovers(hosted: tuple[Any, Any]) -> None:
    process, connection = hosted
    store = BoundedStore(connection, rank=1, timeout=1.0)
    store.set("a", "1")
    os.kill(process.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(CommunicationError, match=r"rank 1: the group's store, .* has not answered within 1 s"):
        store.get("a")
    with pytest.raises(CommunicationError, match="has not answered"):
        store.check(["a"])
    assert time.monotonic() - started < 10, "the second one does not wait again"
    os.kill(process.pid, signal.SIGCONT)
    deadline = time.monotonic() + 20
    while True:
        try:
            assert store.read("a") == b"1"
            break
        except CommunicationError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    process.kill()
    process.wait()
    with pytest.raises(CommunicationError, match=r"rank 1 lost the group's store, which lives in the launcher"):
        store.get("a")


def test_an_exchange_over_a_stopped_store_ends(hosted: tuple[Any, Any]) -> None:
    process, connection = hosted
    controls: dict[int, StoreControl] = {}

    def join(rank: int) -> None:
        controls[rank] = StoreControl(connection.clone(), rank=rank, world_size=2, timeout=2.0)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert controls[0].number == controls[1].number
    os.kill(process.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(CommunicationError, match="store"):
        controls[1].exchange("hello", 1)
    controls[1].raise_if_peer_failed()
    assert controls[1].heard(1.0) == {}
    assert time.monotonic() - started < 15


def host_is_stopped(folder: str) -> dict[str, Any]:
    """Rank 0 hosts the store, as it does without torchrun, and is stopped in the middle of training."""
    rank = int(os.environ["RANK"])
    with shardrt.Runtime(timeout=4) as rt:
        model = torch.nn.Linear(4, 4)
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
        train_step(model, opt)
        rt.differs("everybody is here", rank)
        Path(folder, f"here-{rank}").touch()  # it has read what the others said from the store
        if rank == 0:
            Path(folder, "pid").write_text(str(os.getpid()))
            threading.Event().wait(60)
        if rank == 1:
            wait_for_file(Path(folder, "pid"))
            wait_for_file(Path(folder, "here-2"))
            os.kill(int(Path(folder, "pid").read_text()), signal.SIGSTOP)
            Path(folder, "stopped").touch()
        wait_for_file(Path(folder, "stopped"))
        started = time.monotonic()
        try:
            train_step(model, opt)
        except shardrt.ShardrtError as error:
            took = time.monotonic() - started
            rt.report_failure(error)
            rt.close()
            closed = time.monotonic() - started - took
            Path(folder, f"told-{rank}").touch()
            if rank == 1:
                wait_for_file(Path(folder, "told-2"))
                os.kill(int(Path(folder, "pid").read_text()), signal.SIGKILL)
            return {"text": str(error), "seconds": took, "closing": closed}
    return {}


def train_step(model: torch.nn.Module, opt: Any) -> None:
    model(torch.ones(1, 4)).sum().backward()
    opt.step()


def test_ranks_end_when_the_host_of_the_store_is_stopped(ranks: RankPool, tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    outcomes = ranks.outcomes(host_is_stopped, ranks=3, init=None, grace=40, env=env, folder=str(tmp_path))
    assert outcomes[0].error_message == "ended by SIGKILL"
    for outcome in outcomes[1:]:
        assert outcome.ok and "rank 0" in outcome.value["text"].partition("\n")[0], outcome
        assert outcome.value["seconds"] < 15 and outcome.value["closing"] < 15
        assert "what each rank did last:\n  rank 0: " in outcome.value["text"]


def test_a_call_that_blocks_for_ever_is_left() -> None:
    never = threading.Event()
    started = time.monotonic()
    with pytest.raises(CommunicationError, match=r"rank 3: starting did not end within 0.2 s"):
        within(0.2, "starting", lambda: never.wait(60), rank=3)
    assert time.monotonic() - started < 20
    never.set()
    with pytest.raises(ZeroDivisionError):
        within(5.0, "dividing", lambda: 1 / 0, rank=3)


@pytest.mark.parametrize(
    "leftovers",
    [
        {},
        {"1": "old", "2": "old"},
        {"1": "old", "proposal/1": '{"number": 7, "word": "old"}', "7/1": ""},
        {"2": "old", "missing/2": '{"missing": [1], "word": "old"}'},
    ],
)
def test_ranks_meet_whatever_earlier_ones_have_left(leftovers: dict[str, str]) -> None:
    store = dist.HashStore()
    for name, value in leftovers.items():
        store.set(f"shardrt/meeting/{name}", value)
    numbers: list[int] = []

    def join(rank: int, pause: float) -> None:
        time.sleep(pause)  # whoever comes late finds a proposal that has an old word of his
        numbers.append(
            meet(BoundedStore(store, rank=rank, timeout=20), rank=rank, world_size=3, timeout=20, topic="Runtime")
        )

    for _ in range(2):
        threads = [threading.Thread(target=join, args=(rank, 0.1 * rank)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(numbers) == 6 and len(set(numbers[:3])) == len(set(numbers[3:])) == 1 and numbers[0] < numbers[3]


def test_who_does_not_come_to_the_meeting_is_named_by_all() -> None:
    store = dist.HashStore()
    told: dict[int, str] = {}

    def join(rank: int) -> None:
        try:
            meet(BoundedStore(store, rank=rank, timeout=5), rank=rank, world_size=3, timeout=1.0, topic="Runtime")
        except CommunicationError as error:
            told[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for rank in (0, 1):
        assert told[rank].startswith(f"rank {rank} waited 1 s at 'Runtime' for rank 2 of 3; ")

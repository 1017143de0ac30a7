"""What ranks do in tests of shared memory in which one of them is killed or stopped, is elsewhere, or has no room."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from shardrt_shm import peers
from shardrt_shm.arena import process_arena

import shardrt
from shardrt.testing import Outcome, RankPool
from shardrt.testing.rendezvous import rank_store

TIMEOUT = 8.0
LATEST = 50.0
"""Seconds after which an end counts as a hang: a start waits several times, and machines are busy."""
OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce", "all_to_all", "broadcast", "barrier")


def operate(communicator: Any, dice: random.Random) -> None:
    """One operation, the same on all ranks, with an answer that is checked."""
    rank, world_size = communicator.rank, communicator.world_size
    sizes = [dice.randrange(0, 60_000) for _ in range(world_size)]
    kind, is_shared = dice.choice(OPERATIONS), dice.random() < 0.5
    numel, start = sum(sizes), sum(sizes[:rank])
    buffer = communicator.allocate(numel, torch.float32) if is_shared else None
    buffer = torch.empty(numel) if buffer is None else buffer
    buffer.fill_(rank + 1)
    total = world_size * (world_size + 1) / 2
    if kind == "reduce_scatter":
        communicator.reduce_scatter(buffer, sizes).wait()
        assert buffer[start : start + sizes[rank]].eq(total).all()
    elif kind == "all_gather":
        communicator.all_gather(buffer, sizes).wait()
        assert all(part.eq(owner + 1).all() for owner, part in enumerate(buffer.split(sizes)))
    elif kind == "all_reduce":
        communicator.all_reduce(buffer).wait()
        assert buffer.eq(total).all()
    elif kind == "all_to_all":
        received = [torch.empty(sizes[rank]) for _ in range(world_size)]
        communicator.all_to_all(received, list(buffer.split(sizes))).wait()
        assert all(part.eq(sender + 1).all() for sender, part in enumerate(received))
    elif kind == "broadcast":
        communicator.broadcast(buffer, 1).wait()
        assert buffer.eq(2).all()
    else:
        communicator.barrier()


def killed_at(
    seconds: float, victim: int, dice_seed: int, after: str = "start", signals: str = "SIGKILL"
) -> dict[str, Any]:
    """Start a runtime and run operations until an error; the victim is killed or stopped so long after the start, or
    after all ranks have come to their operations."""
    store, rank = rank_store(), int(os.environ["RANK"])
    store.set(f"pid/{rank}", str(os.getpid()))
    pids = [int(store.get(f"pid/{one}")) for one in range(int(os.environ["WORLD_SIZE"]))]

    def happen() -> None:
        # Not store.get, which keeps the connection to itself while it waits: the rank's own calls would wait too.
        awaited = [f"operating/{one}" for one in range(len(pids))] if after == "operations" else []
        while awaited and not store.check(awaited):
            time.sleep(0.05)
        time.sleep(seconds)
        store.set("happened", str(time.monotonic()))
        os.kill(pids[victim], getattr(signal, signals))

    if rank == (victim + 1) % len(pids):
        threading.Thread(target=happen, daemon=True).start()
    phase, dice = "start", random.Random(dice_seed)
    error: BaseException | None = None
    try:
        with shardrt.Runtime(backend="shm", timeout=TIMEOUT) as rt:
            phase = "operations"
            store.set(f"operating/{rank}", "")
            while not store.check(["happened"]) or time.monotonic() - float(store.get("happened")) < LATEST:
                operate(rt._communicator, dice)
    except shardrt.ShardrtError as raised:
        error = raised
    seconds_after = time.monotonic() - float(store.get("happened"))
    if signals == "SIGSTOP":
        store.add("told", 1)
        if rank == (victim + 1) % len(pids):
            while store.add("told", 0) < len(pids) - 1:
                time.sleep(0.05)
            os.kill(pids[victim], signal.SIGKILL)
    return {"phase": phase, "error": f"{type(error).__name__}: {error}", "seconds": seconds_after}


def kill_one(pool: RankPool, seed: int, ranks: int = 3) -> tuple[int, list[Outcome]]:
    """A start in which a random rank is killed at a random moment, from the beginning or while it is at work."""
    dice = random.Random(seed)
    victim, seconds = dice.randrange(ranks), dice.choice([0.02, 0.3, 1.5]) * dice.random()
    options = {"seconds": seconds, "victim": victim, "dice_seed": seed, "after": dice.choice(["start", "operations"])}
    return victim, pool.outcomes(killed_at, ranks=ranks, timeout=90, grace=60, init=None, **options)


def leftovers() -> set[str]:
    """Names of all files in shared memory, and of temporary files that could be of the backend. Others that run beside
    this make temporary files of their own."""
    places = {"/dev/shm": "*", "/tmp": "*shm*"}
    return {str(path) for place, names in places.items() for path in Path(place).glob(names)}


def verdict(victim: int, outcomes: list[Outcome]) -> str:
    """What is wrong with how the others ended, or nothing."""
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            if outcome.error_type != "WorkerDied":
                return f"rank {rank}, which was killed, {outcome.describe()}"
        elif not outcome.ok:
            return f"rank {rank}: {outcome.describe()}"
        elif not outcome.value["error"].startswith(("CommunicationError", "PeerError")):
            return f"rank {rank} ended with {outcome.value['error']}"
        elif outcome.value["seconds"] > LATEST:
            return f"rank {rank} took {outcome.value['seconds']:.1f} s"
    return ""


@contextmanager
def elsewhere(how: str) -> Iterator[None]:
    """Things this machine has not got two of: told as if."""
    with ExitStack() as stack:
        if how == "another host":
            stack.enter_context(mock.patch.object(peers, "_host", lambda: "another"))
        elif how == "another container":
            stack.enter_context(mock.patch.object(peers, "_namespace", lambda: "pid:[1]"))
        elif how == "no room":
            stack.enter_context(mock.patch.object(peers, "why_no_room", lambda nbytes: "there is no room"))
        elif how in ("another file", "another user"):
            file = stack.enter_context(Path(os.devnull).open("rb"))
            changed = {"file": file.fileno()} if how == "another file" else {"user": 65534}
            told = {**peers.introduce(), **changed}
            stack.enter_context(mock.patch.object(peers, "introduce", lambda: told))
        yield


def choose(how: str, backend: str = "auto") -> dict[str, Any]:
    """The backend that a runtime takes when the last rank is special."""
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    with elsewhere(how if is_last else ""), shardrt.Runtime(backend=backend, timeout=30) as rt:
        buffer = torch.full((1000,), rt.rank + 1.0)
        rt._communicator.all_reduce(buffer).wait()
        return {"backend": rt.backend, "reason": rt.backend_reason, "sum": buffer[0].item()}


def permissions() -> dict[str, Any]:
    """The mode of this process's memory, and whether another user gets at it."""
    arena = process_arena()
    memory = arena.take(4096)
    memory.fill_(7)
    path = f"/proc/{os.getpid()}/fd/{arena.fd}"
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        try:
            os.open(path, os.O_RDONLY)
            said = "opened"
        except OSError as error:
            said = type(error).__name__
        os.write(writing, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reading, 100).decode()
    for one in (reading, writing):
        os.close(one)
    shrunk = ""
    try:
        os.ftruncate(arena.fd, 0)
    except OSError as error:
        shrunk = type(error).__name__
    about = os.fstat(arena.fd)
    return {
        "mode": oct(about.st_mode & 0o777),
        "links": about.st_nlink,
        "other user": said,
        "shrinking": shrunk,
        "name": str(Path(path).readlink()),
        "still there": bool(memory.eq(7).all()),
    }

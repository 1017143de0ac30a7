"""Training in which one rank is stopped, killed, raises, calls something else or stays away: run on worker ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

import shardrt
from shardrt.flight.report import report_name
from shardrt.testing.rendezvous import rank_store
from tests.ranks.twins import Odd, batch

TIMEOUT = 6.0
ODD_ONE = 1
"""The rank that something happens to."""


def lose(how: str, schedule: str, reports: str, backend: str = "gloo", patience: float = TIMEOUT) -> dict[str, Any]:
    """Train; after two steps ``how`` happens to one rank. Survivors answer with what they were told, and when."""
    store = rank_store()
    rank = int(os.environ["RANK"])
    store.set(f"pid/{rank}", str(os.getpid()))
    torch.manual_seed(1)
    model = Odd()
    # What torch imports with the first optimizer takes seconds on a busy machine: not while others wait.
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), 0, rank)
    with shardrt.Runtime(
        timeout=patience, schedule=schedule, backend=backend, bucket_mb=0.001, hang_reports=reports
    ) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
        for step in range(2):
            train_step(model, opt, step, rank)
        wait_until_heard(rt, steps=2)
        rt.differs("all have been heard", rank)
        if rank == ODD_ONE:
            happen(how, rt, model, store)
        elif how == "stopped" and rank == 0:
            store.get("ready")  # it is about to wait; the key comes before
            os.kill(int(store.get(f"pid/{ODD_ONE}")), signal.SIGSTOP)
            store.set("stopped", "")
        if how == "stopped":
            store.get("stopped")
        started = time.monotonic()
        try:
            for step in range(2, 5):
                train_step(model, opt, step, rank)
        except shardrt.ShardrtError as error:
            rt.report_failure(error)
            took = time.monotonic() - started
            rt.close()
            closed = time.monotonic() - started - took
            return {"type": type(error).__name__, "text": str(error), "seconds": took, "closing": closed}
        finally:
            if rank != ODD_ONE:
                release_the_odd_one(how, store, rank, rt.world_size, Path(reports))
    return {"type": "", "text": "", "seconds": 0.0, "closing": 0.0}


def wait_until_heard(rt: shardrt.Runtime, steps: int, seconds: float = 20.0) -> None:
    """Until the store knows that every rank has made so many steps."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        heard = rt._control.heard(1.0)
        if len(heard) == rt.world_size and all(words["step"] >= steps for words in heard.values()):
            return
        time.sleep(0.05)
    raise AssertionError(f"not everybody was heard: {heard}")


def train_step(model: torch.nn.Module, opt: Any, step: int, rank: int) -> None:
    model(batch(step, rank)).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()


def happen(how: str, rt: shardrt.Runtime, model: torch.nn.Module, store: Any) -> None:
    if how == "stopped":
        store.set("ready", "")
        threading.Event().wait(60)  # stopped here, and ended by the test's pool
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raised":
        raise ValueError("bad batch")
    elif how == "clips":
        model(batch(9, rt.rank)).pow(2).mean().backward()
        rt.clip_grad_norm_(model, 1.0)
    elif how == "elsewhere":
        stuck_in_my_own_code(store)


def stuck_in_my_own_code(store: Any) -> None:
    store.get("over")


def release_the_odd_one(how: str, store: Any, rank: int, world_size: int, reports: Path) -> None:
    """Once every survivor has its error, a rank that is stopped or stuck is ended, so that the pool goes on."""
    store.set(f"told/{rank}", "")
    if rank == 0:
        for other in range(world_size):
            if other != ODD_ONE:
                store.get(f"told/{other}")
        if how == "stopped":
            os.kill(int(store.get(f"pid/{ODD_ONE}")), signal.SIGKILL)
        elif how == "elsewhere":
            wait_for_file(reports / report_name(ODD_ONE, world_size))
            store.set("over", "")


def wait_for_file(path: Path, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)

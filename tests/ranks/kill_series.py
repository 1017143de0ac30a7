"""The series of kills: which points, how one is run, and what must come of it.

Each point is two runs. In the first, one rank ends by SIGKILL and the others must fail within the timeout; the second
goes on from what is there. Their processes come from a server that has imported everything and has no threads (a
process forked from a worker would inherit locks that threads of it hold): one then costs milliseconds, and many points
run at once, since most of their time is spent waiting for a rank that is gone.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch.distributed as dist

from shardrt.errors import ShardrtError
from shardrt.testing import RankPool
from shardrt.testing.rendezvous import CALL_VARIABLE
from tests.ranks.crashing import AFTER_POINTER, BEFORE_COMMIT, PHASES, SAVES, STEPS, TRAINING, Point, train

MOST_SECONDS = 150.0
_STEP_OF = {number: step for step, number in SAVES.items()}


@attrs.frozen(kw_only=True)
class Kill:
    """One point of the series."""

    number: int
    ranks: int
    victim: int
    asynchronous: bool
    point: Point
    timeout: float = 6.0

    @property
    def allowed(self) -> set[int | None]:
        """The steps of the checkpoints that the next start may find; None is none."""
        at, phase = self.point.at, self.point.phase
        if phase in TRAINING:
            done = [None, *(step for step in SAVES if step < at)]
            return set(done[-2:] if self.asynchronous else done[-1:])
        old, new = _STEP_OF.get(at - 1), _STEP_OF[at]
        if phase in BEFORE_COMMIT and not (phase.startswith("manifest") and self.point.how == "after"):
            return {old}
        return {new} if phase in AFTER_POINTER else {old, new}


Reference = Mapping[tuple[int, bool], list[Any]]
"""By number of ranks and kind of saving: what each rank of an uninterrupted run returned."""


def references(pool: RankPool, world_sizes: Sequence[int] = (2, 3), kinds: Sequence[bool] = (False, True)) -> Reference:
    """Runs that nobody interrupts."""
    found = {}
    for ranks in world_sizes:
        for asynchronous in kinds:
            with tempfile.TemporaryDirectory() as folder:
                [answers] = _on_ranks(pool, [{"path": folder, "ranks": ranks, "asynchronous": asynchronous}])
            assert all(answer["status"] == "ok" for [answer] in answers), answers
            found[ranks, asynchronous] = [answer["value"] for [answer] in answers]
    return found


def choose_points(reference: Reference, count: int, seed: int) -> list[Kill]:
    """Points spread evenly over the phases, and at random over saves, ranks and the calls inside a phase."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        phase = PHASES[number % len(PHASES)]
        runs = [key for key in reference if any(row[0] == phase for rank in reference[key] for row in rank["counts"])]
        key = chance.choice(runs)
        places = [
            (rank, at, calls)
            for rank, answer in enumerate(reference[key])
            for name, at, calls in answer["counts"]
            if name == phase
        ]
        victim, at, calls = chance.choice(places)
        point = Point(
            phase=phase, at=at, call=chance.randrange(calls), how=chance.choice(["before", "middle", "after"])
        )
        found.append(Kill(number=number, ranks=key[0], victim=victim, asynchronous=key[1], point=point))
    return found


@attrs.frozen(kw_only=True)
class Verdict:
    """What came of a point."""

    kill: Kill
    found: str
    """``old``, ``new``, or ``none``: which checkpoint the next start went on from."""
    problems: tuple[str, ...]


def run_kills(
    pool: RankPool, kills: Sequence[Kill], reference: Reference, *, at_once: int, done: Callable[[Verdict], None]
) -> list[Verdict]:
    """Run points, several at once; a point that a slow machine did not reach is run again with more time."""
    verdicts = []
    waiting = list(kills)
    while waiting:
        batch, waiting = waiting[:at_once], waiting[at_once:]
        folders = [tempfile.mkdtemp() for _ in batch]
        try:
            answers = _on_ranks(pool, [_order(kill, folder) for kill, folder in zip(batch, folders, strict=True)])
        finally:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
        for kill, answer in zip(batch, answers, strict=True):
            if answer[kill.victim][0]["status"] != "SIGKILL" and kill.timeout < 20:
                waiting.append(attrs.evolve(kill, timeout=20.0))
                continue
            verdicts.append(judge(kill, answer, reference[kill.ranks, kill.asynchronous]))
            done(verdicts[-1])
    return verdicts


def judge(kill: Kill, answers: Sequence[Any], reference: Sequence[Any]) -> Verdict:
    """Hold what the ranks of both runs say against what must be."""
    problems = []
    for rank, (killed, _) in enumerate(answers):
        if rank == kill.victim and killed["status"] != "SIGKILL":
            problems.append(f"rank {rank} was to be killed: {killed}")
        if rank != kill.victim and not (killed["status"] == "error" and killed["ours"]):
            problems.append(f"rank {rank} lost a peer and says: {str(killed)[:300]}")
    resumed = [second for _, second in answers]
    if any(one["status"] != "ok" for one in resumed):
        return Verdict(kill=kill, found="none", problems=(*problems, f"did not go on: {resumed}"))
    values = [one["value"] for one in resumed]
    found = values[0]["found"]
    if any(value["found"] != found for value in values) or found not in kill.allowed:
        problems.append(f"found {[value['found'] for value in values]}, allowed is {kill.allowed}")
    for rank, (value, whole) in enumerate(zip(values, reference, strict=True)):
        differing = [step for step, digest in value["digests"].items() if whole["digests"][step] != digest]
        if differing or str(STEPS) not in value["digests"]:
            problems.append(f"rank {rank} differs from the uninterrupted run after steps {differing}")
    value = values[0]
    if value["complete"][-1] != max(SAVES):
        problems.append(f"complete at the end: {value['complete']}")
    if found != max(SAVES) and (value["all"] != value["complete"] or len(value["all"]) > 2):
        problems.append(f"leftovers were not removed: {value['all']}, complete: {value['complete']}")
    new = kill.point.phase not in TRAINING and found == _STEP_OF[kill.point.at]
    outcome = "none" if found is None else "new" if new else "old"
    return Verdict(kill=kill, found=outcome, problems=tuple(problems))


def _order(kill: Kill, folder: str) -> dict[str, Any]:
    return {
        "path": folder,
        "ranks": kill.ranks,
        "asynchronous": kill.asynchronous,
        "victim": kill.victim,
        "point": attrs.asdict(kill.point),
        "timeout": kill.timeout,
    }


def _on_ranks(pool: RankPool, orders: list[dict[str, Any]]) -> list[list[Any]]:
    """For each order, what each of its ranks says of its runs."""
    ranks = max(order["ranks"] for order in orders)
    answers = pool.run(carry_out, ranks=ranks, init=None, timeout=2 * MOST_SECONDS + 60, orders=orders)
    return [[answers[rank][number] for rank in range(order["ranks"])] for number, order in enumerate(orders)]


def carry_out(orders: list[dict[str, Any]]) -> list[Any]:
    """On a worker: this rank's part of each order, all of them at once."""
    rank = int(os.environ["RANK"])
    under_way = {n: _runs(order, n, rank) for n, order in enumerate(orders) if rank < order["ranks"]}
    answers: list[Any] = [None] * len(orders)
    while under_way:
        for number, steps in list(under_way.items()):
            answer = next(steps)
            if answer is not None:
                answers[number] = answer
                del under_way[number]
        time.sleep(0.02)
    return answers


def _runs(order: dict[str, Any], number: int, rank: int) -> Iterator[list[Any] | None]:
    """Start a run, look for its end, start the next: yields None until the answers are there."""
    first = {name: order[name] for name in ("victim", "point", "timeout") if name in order}
    answers = []
    for name, more in (("first", first), ("second", {}))[: 2 if first else 1]:
        with tempfile.TemporaryDirectory() as folder:
            said = Path(folder) / "said.json"
            meeting = f"{os.environ[CALL_VARIABLE]}/{number}/{name}"
            arguments = {"path": order["path"], "asynchronous": order["asynchronous"], **more}
            process = _server().Process(
                target=run_apart, args=(str(said), meeting, rank, order["ranks"], _where(), arguments), daemon=True
            )
            process.start()
            deadline = time.monotonic() + MOST_SECONDS
            while process.exitcode is None and time.monotonic() < deadline:
                yield None
            if process.exitcode is None:
                process.kill()
                answers.append({"status": "stuck"})
            elif process.exitcode < 0:
                answers.append({"status": signal.Signals(-process.exitcode).name})
            else:
                answers.append(json.loads(said.read_text()) if said.exists() else {"status": "silent"})
            process.join()
    yield answers


@functools.cache
def _server() -> ForkServerContext:
    """Where processes are forked, with everything imported; it finds this module only if told where to look."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.ranks.kill_preload"])
    with mock.patch.dict(os.environ, {"PYTHONPATH": str(Path(__file__).parents[2])}):
        forkserver.ensure_running()
    return context


def _where() -> tuple[str, int]:
    """Where ranks meet; the server was started in another call, and does not know."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def run_apart(
    said: str, meeting: str, rank: int, ranks: int, where: tuple[str, int], arguments: dict[str, Any]
) -> None:
    """In a process of its own: one run."""
    answer: dict[str, Any]
    try:
        store = dist.TCPStore(*where, is_master=False)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(meeting, store), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
        )
        point = arguments.pop("point", None)
        options = {"timeout": 40.0, **arguments}
        answer = {"status": "ok", "value": train(point=None if point is None else Point(**point), **options)}
    except Exception as error:
        ours = isinstance(error, ShardrtError)
        answer = {"status": "error", "ours": ours, "text": f"{type(error).__name__}: {error}"[:500]}
    Path(said).write_text(json.dumps(answer))
    os._exit(0)

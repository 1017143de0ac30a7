"""One call on several workers, from handing it out to the last release. See Note [Worker protocol]."""

from __future__ import annotations

import selectors
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shardrt.testing.outcome import Outcome
from shardrt.testing.process import WorkerProcess

_LOOK_AGAIN = 0.2
"""Seconds after which the processes are looked at even though no pipe has moved."""
_LINGER = 1.0
"""Seconds that a rank which failed keeps its connections, so that its peers can finish what they can."""
_RELEASE_PATIENCE = 15.0


class Call:
    """The state of one call; ``timed_out`` says whether the workers were ended because some did not answer."""

    def __init__(self, number: int, workers: Sequence[WorkerProcess], *, timeout: float, grace: float) -> None:
        self.number = number
        self.timed_out = False
        self._workers = workers
        self._timeout = timeout
        self._grace = grace
        self._outcomes: dict[int, Outcome] = {}
        self._gone: set[int] = set()
        self._release_sent: set[int] = set()
        self._released: set[int] = set()
        self._first_failure: float | None = None
        self._first_death: float | None = None

    def run(self, messages: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Hand out one message per worker and wait for all of them to answer, to end, or to run out of time."""
        started = time.monotonic()
        for worker, message in zip(self._workers, messages, strict=True):
            worker.mark_output()
            worker.send({"call": self.number, **message})
        with selectors.DefaultSelector() as selector:
            for rank, worker in enumerate(self._workers):
                selector.register(worker, selectors.EVENT_READ, rank)
            self._await_answers(selector, started)
            if not self.timed_out:
                self._await_releases(selector)
        return [self._outcomes[rank] for rank in range(len(self._workers))]

    @property
    def _pending(self) -> list[int]:
        return [rank for rank in range(len(self._workers)) if rank not in self._outcomes]

    def _await_answers(self, selector: selectors.BaseSelector, started: float) -> None:
        while self._pending:
            now = time.monotonic()
            if self._first_failure is not None and now > self._first_failure + _LINGER:
                self._release(rank for rank, outcome in self._outcomes.items() if not outcome.ok)
            if now > started + self._timeout:
                self._give_up(f"no answer within {self._timeout:g} s")
                self.timed_out = True
            elif self._first_death is not None and now > self._first_death + self._grace:
                self._give_up(f"did not finish within {self._grace:g} s after a peer had ended")
            else:
                self._listen(selector)

    def _await_releases(self, selector: selectors.BaseSelector) -> None:
        everyone = set(range(len(self._workers)))
        self._release(everyone)
        deadline = time.monotonic() + _RELEASE_PATIENCE
        while everyone - self._released - self._gone and time.monotonic() < deadline:
            self._listen(selector)
        for rank in everyone - self._released - self._gone:
            self._workers[rank].close()

    def _release(self, ranks: Any) -> None:
        for rank in set(ranks) - self._release_sent - self._gone:
            self._release_sent.add(rank)
            self._workers[rank].send({"release": self.number})

    def _listen(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(_LOOK_AGAIN):
            rank: int = key.data
            received = self._workers[rank].receive()
            if received is None:
                selector.unregister(key.fileobj)
                self._note_death(rank)
            for message in received or ():
                self._note(rank, message)
        for rank in set(range(len(self._workers))) - self._gone:
            if self._workers[rank].ended and not _readable(self._workers[rank]):
                selector.unregister(self._workers[rank])
                self._note_death(rank)

    def _note(self, rank: int, message: Mapping[str, Any]) -> None:
        if "released" in message:
            self._released.add(rank)
            return
        answer = {name: value for name, value in message.items() if name != "call"}
        answer["error_bases"] = tuple(answer.get("error_bases", ()))
        self._outcomes[rank] = Outcome(rank=rank, output=self._workers[rank].output(), **answer)
        if not self._outcomes[rank].ok and self._first_failure is None:
            self._first_failure = time.monotonic()

    def _note_death(self, rank: int) -> None:
        self._gone.add(rank)
        worker = self._workers[rank]
        if rank not in self._outcomes:
            self._outcomes[rank] = Outcome(
                rank=rank, error_type="WorkerDied", error_message=worker.exit_text(), output=worker.output()
            )
            self._first_death = self._first_death or time.monotonic()
        worker.close()

    def _give_up(self, why: str) -> None:
        """Collect the stacks of those that are stuck, then end everyone: their connections are of no more use."""
        stuck = self._pending
        for rank in stuck:
            self._workers[rank].ask_for_stacks()
        for rank in stuck:
            worker = self._workers[rank]
            self._outcomes[rank] = Outcome(
                rank=rank,
                error_type="WorkerStuck",
                error_message=why,
                traceback=worker.stacks(),
                output=worker.output(),
                seconds=self._timeout,
            )
        for rank, worker in enumerate(self._workers):
            self._gone.add(rank)
            worker.close()


def _readable(worker: WorkerProcess) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(worker, selectors.EVENT_READ)
        return bool(selector.select(0))

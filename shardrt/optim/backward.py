"""Notices during backward which buckets are filled, and hands them on in one order on all ranks.

Note [Rounds]: every synchronised backward is one round, in which each bucket is handed on exactly once, in bucket
order. A bucket that is full waits for those before it; what is left when backward ends (parameters that got no
gradient) is handed on then. So the sequence of collectives follows from the number of backwards alone, whatever each
rank's graph looked like, and a second backward before the step reduces what has accumulated by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from shardrt.errors import OptimizerError


class BackwardWatch:
    """Counts gradients per bucket through one backward after the other."""

    def __init__(self, ready: Callable[[int], None]) -> None:
        self._ready = ready
        self._sizes: Sequence[int] = ()
        self._missing: list[int] = []
        self._next = 0
        self._task: int | None = None
        self._finished: int | None = None
        self.paused = False
        """While True (no_sync) gradients only accumulate."""
        self.synchronised: Callable[[], bool] | None = None
        """Asked as well, where somebody else says when to accumulate only (DDP's no_sync)."""
        self.afterwards: Callable[[], None] | None = None
        """Called when backward has ended for everybody, DDP included."""
        self.beginning: Callable[[], None] | None = None
        """Called before a round begins, and may refuse it."""
        self.rounds = 0
        """Rounds completed since the last step."""
        self.began = 0.0
        """When the first gradient of the current backward came."""

    def start_over(self, sizes: Sequence[int]) -> None:
        """Buckets were laid out anew: how many gradients fill each."""
        self._sizes = sizes
        self._task = None

    def arrived(self, bucket: int) -> None:
        """A gradient of a bucket has been accumulated."""
        if self.paused or (self.synchronised is not None and not self.synchronised()):
            return
        self._begin_round()
        self._missing[bucket] -= 1
        self._hand_on()

    def seen(self) -> None:
        """A synchronised backward goes on, which is a round even if it brings none of these gradients to this rank."""
        if not self.paused and torch._C._current_graph_task_id() != self._finished:
            self._begin_round()

    def pass_round(self) -> None:
        """Other ranks' backward is a round here too, which brings this rank nothing."""
        self.check_complete()
        self.began = time.perf_counter()
        self._missing, self._next = [0] * len(self._sizes), 0
        self._hand_on()
        self.rounds += 1
        if self.afterwards is not None:
            self.afterwards()

    def _begin_round(self) -> None:
        # Each call of backward() has a number: a round that an exception ended is told from one that goes on.
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self.check_complete()
            if self.beginning is not None:
                self.beginning()
            self._task = task
            self.began = time.perf_counter()
            self._missing = list(self._sizes)
            self._next = 0
            call_after_backward(self._finish_round)

    def check_complete(self) -> None:
        """Raise if the last backward ended before all buckets were handed on: peers wait for the rest of them."""
        if self._task is not None:
            handed_on, self._task = self._next, None
            raise OptimizerError(
                f"the last backward ended early, with {handed_on} of {len(self._sizes)} buckets reduced, so ranks no "
                "longer agree on what comes next; an error inside backward cannot be passed over under this schedule, "
                "and a backward inside backward (torch.utils.checkpoint with use_reentrant=True) ends nothing: end the "
                "run, checkpoint with use_reentrant=False, or use schedule='sync'"
            )

    def abandon(self) -> None:
        """An exception has ended the last backward: hand on what is left, so that ranks agree on what comes next."""
        if self._task is not None:
            self._missing = [0] * len(self._sizes)
            self._hand_on()
            self._task = None

    def _hand_on(self) -> None:
        while self._next < len(self._missing) and self._missing[self._next] <= 0:
            self._next += 1
            self._ready(self._next - 1)

    def _finish_round(self) -> None:
        self._missing = [0] * len(self._sizes)
        self._hand_on()
        self._finished, self._task = self._task, None
        self.rounds += 1
        if self.afterwards is not None:
            # Who was called after backward may ask for another call: it comes after everybody else's first.
            call_after_backward(self.afterwards)


def call_after_backward(call: Callable[[], None]) -> None:
    """Call when the backward pass that is running has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)

"""Notices during backward which buckets are filled, and hands them on in one order on all ranks.

Note [Rounds]: every synchronised backward is one round, in which each bucket is handed on exactly once, in bucket
order. A bucket that is full waits for those before it; what is left when backward ends (parameters that got no
gradient) is handed on then. So the sequence of collectives follows from the number of backwards alone, whatever each
rank's graph looked like, and a second backward before the step reduces what has accumulated by then.

Note [Backward inside backward]: reentrant activation checkpointing calls backward inside backward, which is no round of
its own: the round lasts as long as the outermost that was noticed. There a parameter may get a second gradient when its
bucket has been handed on: such buckets are handed on once more when the round ends, those of any rank on all.

Note [Missing on some ranks]: where whole gradients go, memory is bounded by waiting for earlier reductions. A bucket in
which one rank misses a gradient that the others have would be handed on there only when backward ends, which it cannot
while the others, waiting for that reduction, do not take part in the next gather. So whoever knows that a unit's
backward is over says so, and its buckets are handed on as they are.

Note [Tokens]: whether a backward still goes on, or an exception has ended it, autograd does not say. But it keeps what
it is to call at the end exactly as long as that backward lasts, so a weak reference to such a callback knows.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence

import torch

from shardrt.errors import OptimizerError


class BackwardToken:
    """Lives as long as the backward in which it was made. See Note [Tokens]."""

    def __init__(self, ended: Callable[[BackwardToken], None]) -> None:
        """``ended`` is called when that backward has ended without an exception."""
        self.task = torch._C._current_graph_task_id()
        self._ended = ended
        call_after_backward(self)

    def __call__(self) -> None:
        self._ended(self)


class BackwardWatch:
    """Counts gradients per bucket through one backward after the other."""

    def __init__(self, ready: Callable[[int], None]) -> None:
        self._ready = ready
        self._sizes: Sequence[int] = ()
        self._missing: list[int] = []
        self._arrived: set[int] = set()
        self._next = 0
        self._outermost: weakref.ref[BackwardToken] | None = None
        self._open: weakref.ref[BackwardToken] | None = None
        """The backward whose round has begun and not ended."""
        self._nested = False
        self._late: set[int] = set()
        """Buckets that have got a gradient after they were handed on."""
        self._finished: int | None = None
        self.paused = False
        """While True (no_sync) gradients only accumulate."""
        self.synchronised: Callable[[], bool] | None = None
        """Asked as well, where somebody else says when to accumulate only (DDP's no_sync)."""
        self.afterwards: Callable[[], None] | None = None
        """Called when backward has ended for everybody, DDP included."""
        self.beginning: Callable[[], None] | None = None
        """Called before a round begins, and may refuse it."""
        self.handing: Callable[[int], None] | None = None
        """Called right before a bucket is handed on."""
        self.again: Callable[[Sequence[int]], Sequence[int]] | None = None
        """After a round with a backward inside: from this rank's late buckets to those of all ranks."""
        self.rounds = 0
        """Rounds completed since the last step."""
        self.began = 0.0
        """When the first gradient of the current backward came."""

    def start_over(self, sizes: Sequence[int]) -> None:
        """Buckets were laid out anew: how many gradients fill each."""
        self._sizes = sizes
        self._open = None

    def arrived(self, bucket: int, param: int) -> None:
        """A gradient of a bucket has been accumulated; ``param`` tells parameters apart."""
        if self.paused or (self.synchronised is not None and not self.synchronised()):
            return
        self._begin_round()
        if param not in self._arrived:
            self._arrived.add(param)
            self._missing[bucket] -= 1
            self._hand_on()
        elif bucket < self._next:
            self._late.add(bucket)

    def nothing_more(self, buckets: Sequence[int]) -> None:
        """What these have not got by now they do not get in this backward. See Note [Missing on some ranks]."""
        if not self.paused and (self.synchronised is None or self.synchronised()):
            self._begin_round()
            for bucket in buckets:
                self._missing[bucket] = 0
            self._hand_on()

    def seen(self) -> None:
        """A synchronised backward goes on, which is a round even if it brings none of these gradients to this rank."""
        if not self.paused and torch._C._current_graph_task_id() != self._finished:
            self._begin_round()

    def pass_round(self) -> None:
        """Other ranks' backward is a round here too, which brings this rank nothing."""
        self.pass_beginning()
        for _ in self._sizes:
            self.pass_bucket()

    def pass_beginning(self) -> None:
        """Of other ranks' round, whose buckets are passed one by one."""
        self.check_complete()
        self.began = time.perf_counter()
        self._next = 0

    def pass_bucket(self) -> None:
        """The next one; with the last the round is over."""
        self._next += 1
        self._ready(self._next - 1)
        if self._next == len(self._sizes):
            self.rounds += 1
            if self.afterwards is not None:
                self.afterwards()

    def pass_late(self) -> None:
        """Other ranks' backward had one inside: take part in what follows from it."""
        self._hand_on_again(())

    def _hand_on_again(self, late: Sequence[int]) -> None:
        if self.again is not None:
            for bucket in self.again(late):
                self._ready(bucket)

    def notice(self) -> BackwardToken:
        """Inside backward: this is the outermost, unless one around it has been noticed."""
        token = None if self._outermost is None else self._outermost()
        if token is None:
            token = BackwardToken(self._ended)
            self._outermost = weakref.ref(token)
        return token

    def _begin_round(self) -> None:
        token = self.notice()
        if self._open is not self._outermost:
            self.check_complete()
            if self.beginning is not None:
                self.beginning()
            self._open = self._outermost
            self.began = time.perf_counter()
            self._missing = list(self._sizes)
            self._next = 0
            self._nested = False
            self._arrived.clear()
            self._late.clear()
        self._nested = self._nested or torch._C._current_graph_task_id() != token.task

    def check_complete(self) -> None:
        """Raise if the last backward ended before all buckets were handed on: peers wait for the rest of them."""
        if self._open is not None:
            handed_on, self._open = self._next, None
            raise OptimizerError(
                f"the last backward ended early, with {handed_on} of {len(self._sizes)} buckets reduced, so ranks no "
                "longer agree on what comes next; where all ranks raise alike, call opt.zero_grad() and go on with the "
                "next batch; an error on one rank cannot be passed over under this schedule: end the run, or use "
                "schedule='sync'"
            )

    def drop_round(self) -> bool:
        """Its gradients are dropped: if the last backward ended early, hand on what peers wait for; says whether."""
        if self._open is None or self._open() is not None:
            return False
        self._open = None
        self._missing = [0] * len(self._sizes)
        self._hand_on()
        return True

    def _hand_on(self) -> None:
        while self._next < len(self._missing) and self._missing[self._next] <= 0:
            self._next += 1
            if self.handing is not None:
                self.handing(self._next - 1)
            self._ready(self._next - 1)

    def _ended(self, token: BackwardToken) -> None:
        self._outermost = None
        if self._open is None or self._open() is not token:
            return
        self._missing = [0] * len(self._sizes)
        self._hand_on()
        if self._nested:
            self._hand_on_again(sorted(self._late))
        self._finished, self._open = token.task, None
        self.rounds += 1
        if self.afterwards is not None:
            # Who was called after backward may ask for another call: it comes after everybody else's first.
            call_after_backward(self.afterwards)


def call_after_backward(call: Callable[[], None]) -> None:
    """Call when the backward pass that is running has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)

"""What an optimizer adds to a timeline: forward, backward and step of the trainer, and local updates."""

from __future__ import annotations

import time

from shardrt.timeline import Timeline


class TrainerSpans:
    """Cuts the time of the training thread at the moments that an optimizer gets to see."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._since: float | None = None

    def backward(self, began: float) -> None:
        """Backward has ended; its first gradient came at ``began``. What was before it, since the step, is forward."""
        ended = time.perf_counter()
        if self._since is not None and self._since < began:
            self._timeline.span("trainer", "forward", self._since, began)
        self._timeline.span("trainer", "backward", began, ended)
        self._since = None

    def step(self, began: float, number: int) -> None:
        """A step has ended. Under a schedule that does not listen to backward, forward and backward are one."""
        ended = time.perf_counter()
        if self._since is not None and self._since < began:
            self._timeline.span("trainer", "forward and backward", self._since, began)
        self._timeline.span("trainer", "step", began, ended, number=number)
        self._since = ended

    def update(self, began: float) -> None:
        """The local optimizer has stepped."""
        self._timeline.span("update", "update", began, time.perf_counter(), **self._timeline.noted())

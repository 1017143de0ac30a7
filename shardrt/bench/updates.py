"""How long optimizers update, whoever calls them: the clock that all contestants share.

Note [Whose update]: every contestant's parameters are updated by torch's own AdamW, be it over whole parameters, over
pieces of them, or in another thread than the trainer's. So its ``step`` is put under a clock, in the class, before
anybody makes one. What happens around it (reducing, gathering, waiting) is not counted.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_Base = next(kind for kind in torch.optim.AdamW.__mro__ if "step" in vars(kind))


class UpdateClock:
    """Seconds spent inside AdamW's ``step`` so far, in all threads."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._lock = threading.Lock()

    def read(self) -> float:
        """So far."""
        with self._lock:
            return self._seconds

    def timed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The same function under the clock."""

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return step(*args, **kwargs)
            finally:
                with self._lock:
                    self._seconds += time.perf_counter() - started

        # Else whoever looks for the step as its author wrote it would find the one without the clock.
        del run.__wrapped__
        return run


@contextmanager
def updates_timed() -> Iterator[UpdateClock]:
    """Put AdamW under a clock, for optimizers that are made inside the block. See Note [Whose update].

    Example:
        >>> import torch
        >>> from shardrt.bench.updates import updates_timed
        >>> with updates_timed() as clock:
        ...     layer = torch.nn.Linear(2, 2)
        ...     optimizer = torch.optim.AdamW(layer.parameters())
        ...     layer(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        ...     clock.read() > 0
        True
    """
    clock = UpdateClock()
    # torch wraps a class's step when the first optimizer of it is made, and puts the result into that class.
    before = {kind: vars(kind).get("step") for kind in (torch.optim.AdamW, _Base)}
    plain = before[_Base]
    assert plain is not None
    bare = plain.__wrapped__ if getattr(plain, "hooked", False) else plain
    if torch.optim.AdamW is not _Base and before[torch.optim.AdamW] is not None:
        del torch.optim.AdamW.step
    _Base.step = clock.timed(bare)  # type: ignore[attr-defined]
    try:
        yield clock
    finally:
        for kind, step in before.items():
            if step is not None:
                kind.step = step  # type: ignore[attr-defined]
            elif "step" in vars(kind):
                del kind.step  # type: ignore[attr-defined]

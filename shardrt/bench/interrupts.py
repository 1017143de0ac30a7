"""What SIGTERM and Ctrl-C may do while something must not be left behind. Python handles signals in the main thread
only: elsewhere these change nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def terminating_in_order() -> Iterator[None]:
    """SIGTERM unwinds, as Ctrl-C does, unless the program handles it itself."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if not _in_main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that come during a short block take effect after it: taking things down must not stop midway."""
    if not _in_main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: set by something that is not Python, which cannot be set from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for once in dict.fromkeys(came):
            signal.raise_signal(once)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()

"""Starting several operations and seeing all of them through, also when one of them fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from shardrt.protocols import Work

T = TypeVar("T")


def start_and_wait(start: Callable[[T], Work], items: Iterable[T]) -> None:
    """Start an operation for each item, then wait for all that were started; the first error is raised at the end.

    Buffers must not be touched while an operation on them is under way, so nobody may leave before all are done.

    Example:
        >>> from shardrt.comm.waiting import start_and_wait
        >>> class Printing:
        ...     def __init__(self, item): self.item = item
        ...     def wait(self): print("done", self.item)
        >>> start_and_wait(Printing, [1, 2])
        done 1
        done 2
    """
    started: list[Work] = []
    errors: list[Exception] = []
    try:
        for item in items:
            started.append(start(item))
    except Exception as error:
        errors.append(error)
    for work in started:
        try:
            work.wait()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def has_arrived(work: Work) -> bool:
    """Whether waiting for an operation would take no time. Works may say so in ``arrived``; one that does not is taken
    for one that is still under way.

    Example:
        >>> from shardrt.comm.waiting import has_arrived
        >>> from shardrt.comm.works import FinishedWork, FollowedWork
        >>> has_arrived(FollowedWork([FinishedWork()])), has_arrived(object())
        (True, False)
    """
    return getattr(work, "arrived", False) is True

"""What one call on several ranks led to, rank by rank, and the error that tells it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from shardrt.errors import ShardrtError

_OUTPUT_LINES = 30


@attrs.frozen(kw_only=True)
class Outcome:
    """One rank's answer: a value, or the error it ended with.

    Example:
        >>> from shardrt.testing import Outcome
        >>> lost = Outcome(rank=1, error_type="WorkerDied", error_message="ended by SIGKILL")
        >>> lost.ok, lost.describe()
        (False, 'WorkerDied: ended by SIGKILL')
    """

    rank: int
    value: Any = None
    error_type: str | None = None
    """The name of the exception's class; ``WorkerDied`` when the process ended, ``WorkerStuck`` when it had to be."""
    error_message: str = ""
    error_bases: tuple[str, ...] = ()
    """Names of the exception's class and all its bases."""
    traceback: str = ""
    seconds: float = 0.0
    output: str = ""
    """What the rank wrote to stdout and stderr meanwhile, or the end of it."""

    @property
    def ok(self) -> bool:
        """Whether the rank returned a value."""
        return self.error_type is None

    def is_a(self, error: type[BaseException] | str) -> bool:
        """Whether it ended with an error of this class or of one derived from it."""
        name = error if isinstance(error, str) else error.__name__
        return name in (self.error_type, *self.error_bases)

    def describe(self) -> str:
        """The error in one line, or that there was none."""
        return "returned" if self.ok else f"{self.error_type}: {self.error_message}"


class RankFailure(ShardrtError, AssertionError):
    """A call failed on at least one rank; the text has every rank's traceback, identical ones folded.

    Example:
        >>> from shardrt.testing import Outcome, RankFailure
        >>> problem = {"error_type": "ValueError", "error_message": "no", "traceback": "boom"}
        >>> failed = [Outcome(rank=rank, **problem) for rank in (0, 1)]
        >>> print(RankFailure("math:sqrt", failed))
        math:sqrt failed on ranks 0, 1 of 2
        --- ranks 0, 1: ValueError: no
        boom
    """

    def __init__(self, function: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        super().__init__(_tell(function, self.outcomes))


def _tell(function: str, outcomes: Sequence[Outcome]) -> str:
    failed = [outcome for outcome in outcomes if not outcome.ok]
    lines = [f"{function} failed on {_ranks(failed)} of {len(outcomes)}"]
    answered = [outcome for outcome in outcomes if outcome.ok]
    if answered:
        lines.append(f"{_ranks(answered)} returned")
    folded: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in failed:
        folded.setdefault((outcome.describe(), outcome.traceback), []).append(outcome)
    for (error, traceback), alike in folded.items():
        lines.append(f"--- {_ranks(alike)}: {error}")
        if traceback.strip():
            lines.append(traceback.rstrip())
    for outcome in outcomes:
        if outcome.output.strip():
            lines.append(f"--- output of rank {outcome.rank}")
            lines.extend(outcome.output.rstrip().splitlines()[-_OUTPUT_LINES:])
    return "\n".join(lines)


def _ranks(outcomes: Sequence[Outcome]) -> str:
    numbers = ", ".join(str(outcome.rank) for outcome in outcomes)
    return f"rank {numbers}" if len(outcomes) == 1 else f"ranks {numbers}"

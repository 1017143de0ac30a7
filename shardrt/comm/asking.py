"""Whether a backend suits all ranks, asked of all of them: the answer is the same everywhere.

What ranks tell of themselves is exchanged, each rank judges by it, and the judgements are exchanged. A plugin only ever
answers for its own process; nothing that it does can let ranks part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from shardrt.protocols import Availability
from shardrt.registry.probing import probe

if TYPE_CHECKING:
    from shardrt.protocols import ControlChannel
    from shardrt.registry.records import BackendRecord

T = TypeVar("T")
Answers = Mapping[tuple[str, ...], Availability]


def ask_ranks(records: Iterable[BackendRecord], control: ControlChannel) -> Answers:
    """The answers of all ranks as one, by the key of the backend. Every rank asks for the same backends.

    Example:
        >>> from shardrt import Availability, BackendRecord
        >>> from shardrt.comm.asking import ask_ranks
        >>> from shardrt.comm.control import LocalControl
        >>> cable = BackendRecord(
        ...     name="cable",
        ...     summary="a wire",
        ...     factory=object,
        ...     introduce=lambda: "office",
        ...     suits=lambda rooms: Availability.no(f"ranks are in {rooms}", fix="move") if rooms != ["lab"] else None,
        ... )
        >>> ask_ranks([cable], LocalControl())["cpu", "cable"].reason
        "rank 0 says: ranks are in ['office']"
    """
    asked = {"/".join(record.key): record for record in records}
    if not asked:
        return {}
    told = control.exchange("backends: introductions", {name: _introduce(record) for name, record in asked.items()})
    judged = {name: _judge(record, [one[name] for one in told]) for name, record in asked.items()}
    everywhere = control.exchange("backends: answers", judged)
    return {record.key: _together([one[name] for one in everywhere]) for name, record in asked.items()}


def _introduce(record: BackendRecord) -> dict[str, Any]:
    available = probe(record)
    if not available.ok:
        return {"reason": available.reason, "fix": available.fix}
    assert record.introduce is not None
    return _attempt("introduce", record.introduce, lambda word: {"word": word})


def _judge(record: BackendRecord, told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    for rank, one in enumerate(told):
        if "word" not in one:
            return {"reason": f"rank {rank} cannot: {one['reason']}", "fix": one["fix"]}
    assert record.suits is not None
    suits = record.suits
    return _attempt("suits", lambda: suits([one["word"] for one in told]), _as_json)


def _as_json(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, Availability):
        return {"reason": f"its suits returned {answer!r} instead of an Availability", "fix": _FAULTY}
    return {"ok": True, "reason": answer.reason} if answer.ok else {"reason": answer.reason, "fix": answer.fix}


def _attempt(what: str, run: Callable[[], T], show: Callable[[T], dict[str, Any]]) -> dict[str, Any]:
    try:
        return show(run())
    except Exception as error:  # whatever a plugin meets, the other ranks wait for an answer
        return {"reason": f"its {what} raised {type(error).__name__}: {error}", "fix": _FAULTY}


_FAULTY = "upgrade or report the plugin"


def _together(answers: Sequence[Mapping[str, Any]]) -> Availability:
    for rank, answer in enumerate(answers):
        if not answer.get("ok"):
            return Availability.no(f"rank {rank} says: {answer['reason']}", fix=answer["fix"])
    return Availability.yes(answers[0]["reason"])

"""All ranks compare what they are about to do before they do it, and every rank gets the same clear error.

Note [Errors travel too]: a rank that fails while it prepares its side takes part in the comparison all the same and
hands over its error, so that the others raise at once instead of waiting for it until the timeout.

Note [Digests first]: ranks exchange one short digest per field. Only when some differ do they exchange those fields'
values, to name the rank and both values. Agreement, the common case, costs a few hundred bytes per rank.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs

from shardrt.errors import HandshakeError, PeerError
from shardrt.protocols import ControlChannel


@attrs.frozen(kw_only=True)
class Field:
    """Something all ranks must share: its value here, and what to do where they differ."""

    value: Any
    fix: str


@contextmanager
def agreement(control: ControlChannel, topic: str) -> Iterator[dict[str, Field]]:
    """Collect fields in the block, compare them with the other ranks' when it ends.

    An exception in the block is raised here as it is, and on the other ranks as
    :class:`~shardrt.errors.PeerError`; a difference raises :class:`~shardrt.errors.HandshakeError` everywhere.

    Example:
        >>> from shardrt.comm.control import LocalControl
        >>> from shardrt.handshake import Field, agreement
        >>> with agreement(LocalControl(), "example") as fields:
        ...     fields["learning rate"] = Field(value=0.1, fix="give every rank the same one")
    """
    fields: dict[str, Field] = {}
    try:
        yield fields
    except Exception as error:
        if control.world_size > 1:
            control.exchange(topic, {"error": f"{type(error).__name__}: {error}"})
        raise
    if control.world_size > 1:
        _compare(control, topic, fields)


def _compare(control: ControlChannel, topic: str, fields: Mapping[str, Field]) -> None:
    digests = {name: digest(field.value) for name, field in fields.items()}
    answers = control.exchange(topic, {"digests": digests})
    for rank, answer in enumerate(answers):
        if "error" in answer:
            control.peer_failed(rank, answer["error"])
            raise PeerError(f"rank {control.rank} stops at {topic!r} because rank {rank} failed: {answer['error']}")
    if all(answer == answers[0] for answer in answers):
        return
    everywhere = [answer["digests"] for answer in answers]
    # Another version of shardrt may compare other fields: look at those of all ranks.
    names = dict.fromkeys(name for digests in everywhere for name in digests)
    differing = [name for name in names if len({digests.get(name) for digests in everywhere}) > 1]
    own = {name: fields[name].value for name in differing if name in fields}
    values = control.exchange(f"{topic}: differences", own)
    name = differing[0]
    fix = fields[name].fix if name in fields else "install the same version of shardrt on every rank"
    raise HandshakeError(_explain(topic, name, [value.get(name) for value in values], fix))


def digest(value: Any) -> str:
    """A short text that is equal for equal JSON values.

    Example:
        >>> from shardrt.handshake import digest
        >>> digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
        True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _explain(topic: str, name: str, values: list[Any], fix: str) -> str:
    usual = _most_common(values)
    odd_rank = next(rank for rank, value in enumerate(values) if value != values[usual])
    where, odd, common = _first_difference(values[odd_rank], values[usual])
    others = [rank for rank, value in enumerate(values) if value != values[usual] and rank != odd_rank]
    more = f" (ranks {', '.join(map(str, others))} differ too)" if others else ""
    return (
        f"ranks disagree at {topic!r} on {name}{where}: rank {odd_rank} has {_show(odd)}, "
        f"rank {usual} has {_show(common)}{more}; fix: {fix}"
    )


def _most_common(values: list[Any]) -> int:
    keys = [json.dumps(value, sort_keys=True) for value in values]
    return keys.index(Counter(keys).most_common(1)[0][0])


_ABSENT = object()


def _first_difference(odd: Any, common: Any, where: str = "") -> tuple[str, Any, Any]:
    """Walk down to the first place where two JSON values part."""
    if isinstance(odd, dict) and isinstance(common, dict):
        for key in [*common, *(key for key in odd if key not in common)]:
            left, right = odd.get(key, _ABSENT), common.get(key, _ABSENT)
            if left is _ABSENT or right is _ABSENT or left != right:
                return _first_difference(left, right, f"{where}[{key!r}]")
    if isinstance(odd, list) and isinstance(common, list):
        for index in range(max(len(odd), len(common))):
            left = odd[index] if index < len(odd) else _ABSENT
            right = common[index] if index < len(common) else _ABSENT
            if left is _ABSENT or right is _ABSENT or left != right:
                return _first_difference(left, right, f"{where}[{index}]")
    return where, odd, common


def _show(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."

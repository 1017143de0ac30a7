"""From the first bytes of a file to a JSON object, believing nothing on the way.

Note [Hostile headers]: whoever wrote the file may have meant harm, or a disk may have lost bits. So a length is
compared with the size of the real file before anything is read by it, numbers are refused by their digits before they
are made, a key that stands twice is refused since readers disagree on which one counts, and nothing is evaluated.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from shardrt.errors import CheckpointError

LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000
"""What the safetensors library accepts."""
METADATA = "__metadata__"
MOST_DIGITS = 19
"""Of a number in a header: those of the largest offset a file can have, 2**63 - 1."""


def read_header(read: Callable[[int, int], bytes], size: int) -> tuple[bytes, dict[str, Any]]:
    """The bytes before the first tensor, and the object they hold.

    Example:
        >>> from shardrt_safetensors.header import read_header
        >>> file = (2).to_bytes(8, "little") + b"{}"
        >>> read_header(lambda start, stop: file[start:stop], len(file))[1]
        {}
        >>> read_header(lambda start, stop: file[start:stop], 9)
        Traceback (most recent call last):
        ...
        shardrt.errors.CheckpointError: no sound safetensors file: its header claims 2 bytes, and 1 follow
    """
    if size < LENGTH_BYTES:
        raise unsound(f"it has {size} bytes, and the length of the header alone takes {LENGTH_BYTES}")
    first = _read_exactly(read, 0, LENGTH_BYTES)
    length = int.from_bytes(first, "little")
    if length > size - LENGTH_BYTES:
        raise unsound(f"its header claims {length:,} bytes, and {size - LENGTH_BYTES:,} follow")
    if length > MOST_HEADER_BYTES:
        raise unsound(f"its header claims {length:,} bytes, and {MOST_HEADER_BYTES:,} is the most there may be")
    raw = _read_exactly(read, LENGTH_BYTES, LENGTH_BYTES + length)
    return first + raw, _parse(raw)


def unsound(what: str) -> CheckpointError:
    """The error for a file that does not keep to the format."""
    return CheckpointError(f"no sound safetensors file: {what}")


def parse_json(text: str) -> Any:
    """JSON without duplicate keys, fractions, NaN and huge numbers; raises ValueError or RecursionError."""
    return json.loads(
        text, object_pairs_hook=_without_duplicates, parse_int=_int, parse_float=_refuse, parse_constant=_refuse
    )


def _read_exactly(read: Callable[[int, int], bytes], start: int, stop: int) -> bytes:
    data = bytes(read(start, stop))
    if len(data) != stop - start:
        raise unsound(f"bytes [{start}, {stop}) were asked for and {len(data)} came: it was cut while it was read")
    return data


def _parse(raw: bytes) -> dict[str, Any]:
    if raw[:1] != b"{":
        raise unsound(f"its header begins with {raw[:1]!r} instead of b'{{'")
    try:
        header = parse_json(raw.decode())
        if b"\\u" in raw:  # an escape may be half a character, which nobody could write or print
            json.dumps(header, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise unsound(f"its header escapes what is no character: {error.object[error.start : error.end]!r}") from None
    except UnicodeDecodeError as error:
        raise unsound(f"its header is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise unsound("its header is nested without end") from None
    except ValueError as error:
        raise unsound(f"its header is not JSON as it should be: {str(error)[:200]}") from None
    if not isinstance(header, dict):
        raise unsound("its header is not a JSON object")
    return header


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:100]!r} stands there twice")
        found[key] = value
    return found


def _int(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"the number {digits[:30]}... has {len(digits)} characters")
    return int(digits)


def _refuse(number: str) -> NoReturn:
    raise ValueError(f"the number {number[:30]} is no whole number")

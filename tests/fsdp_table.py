"""Reads the tables of docs/fsdp-api.md."""

from __future__ import annotations

import re
from pathlib import Path

import attrs

PAGE = Path(__file__).parents[1] / "docs" / "fsdp-api.md"
ROW = re.compile(
    r"^\| (?:`(?P<owner>\w+)`|(?P<plain>functions)) \| (?P<field>[^|]+) \| (?P<here>[^|]+) \| `(?P<test>[^`|]+)` \|$",
    re.MULTILINE,
)


@attrs.frozen(kw_only=True)
class Row:
    """One field, member, argument or method of torch's."""

    owner: str
    field: str
    here: str
    test: str
    """As ``file::function``, in tests/ranks."""


def rows_of(page: Path = PAGE) -> list[Row]:
    """All rows of the page; a line of a table that is none is an error."""
    text = page.read_text(encoding="utf-8")
    found = [
        Row(
            owner=one["owner"] or one["plain"],
            field=one["field"].strip().strip("`"),
            here=one["here"].strip(),
            test=one["test"],
        )
        for one in ROW.finditer(text)
    ]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    headings = [line for line in lines if line.startswith(("| class ", "| ---"))]
    assert len(found) == len(lines) - len(headings), "a row of docs/fsdp-api.md has another form than the others"
    return found

"""For pytest: put ``pytest_plugins = ["shardrt.testing.pytest_plugin"]`` into the top-level conftest.py.

Brings the fixture ``ranks`` and, at the end of a run, the table of what plugins declare unsupported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from shardrt.testing.pool import RankPool

if "shardrt.testing.conformance" not in sys.modules:
    pytest.register_assert_rewrite("shardrt.testing.conformance")

_LARGEST_WORLD = 4


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """A pool of up to four worker ranks that lasts for the session. Warnings count there as they do here."""
    with RankPool(_LARGEST_WORLD, warning_filters=pytestconfig.getini("filterwarnings")) as pool:
        yield pool


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tell what was not run because a plugin declares that it cannot."""
    from shardrt.testing.conformance import declared

    lines = declared.table()
    if lines:
        terminalreporter.section("declared unsupported by plugins")
        for line in lines:
            terminalreporter.write_line(line)

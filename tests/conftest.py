"""Shared by all tests: worker ranks, and property tests that give the same answer every time."""

from __future__ import annotations

import os
import zlib

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["shardrt.testing.pytest_plugin"]

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of tests of real ranks that are crossed over many things a sample is always run, the same one each time, in which
    every value of each of them occurs; the rest is in the long series. So it is for the kit of backends. Of the doubles
    only Ascend's is another with three ranks than with two."""
    crossed: dict[str, list[pytest.Function]] = {}
    for item in items:
        doubles = "TestHabanaOnItsDouble" in item.nodeid or "TestNcclOnItsDouble" in item.nodeid
        if doubles and "3-ranks" in item.name:
            item.add_marker(pytest.mark.long)
        is_sampled = _share(item) > 1 and item.get_closest_marker("long") is None
        if is_sampled and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            crossed.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cells in crossed.values():
        for cell in _beyond_the_sample(cells, _share(cells[0])):
            cell.add_marker(pytest.mark.long)


_SHARES = {
    "TestGlooInSmallChunks": 16,
    "TestGlooMessages": 12,
    "TestReference": 16,
    "TestShmInSmallSlots": 16,
    "OnItsDouble": 10,
    "TestHosts": 10,
    "tests/ranks/": 8,
    "TestGloo::": 6,
    "TestShm::": 6,
    "test_fallbacks.py": 3,
    "test_conformance_partitioners.py": 2,
    "test_planning_growth.py": 2,
}
"""Of how many cells one is run."""
_AT_LEAST = 2


def _share(item: pytest.Item) -> int:
    return next((share for part, share in _SHARES.items() if part in item.nodeid), 1)


def _beyond_the_sample(cells: list[pytest.Function], share: int) -> list[pytest.Function]:
    """What is not run; full sharding, which has most to go wrong, comes first where only some of it can be."""
    if len(cells) <= _AT_LEAST:
        return []
    values = {cell: {(key, repr(value)) for key, value in cell.callspec.params.items()} for cell in cells}
    in_order = sorted(cells, key=lambda cell: ("full_shard" not in cell.name, zlib.crc32(cell.nodeid.encode())))
    left: list[pytest.Function] = []
    seen: set[tuple[str, str]] = set()
    for cell in in_order:
        if values[cell] <= seen:
            left.append(cell)
        seen |= values[cell]
    wanted = max(_AT_LEAST, -(-len(cells) // share))
    return left[max(0, wanted - (len(cells) - len(left))) :]

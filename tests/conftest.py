"""Shared by all tests: worker ranks, and property tests that give the same answer every time."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["shardrt.testing.pytest_plugin"]

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Three ranks differ from two on Ascend only: the other doubles run them in the long series."""
    for item in items:
        if "3-ranks" in item.name and ("TestHabanaOnItsDouble" in item.nodeid or "TestNcclOnItsDouble" in item.nodeid):
            item.add_marker(pytest.mark.long)

"""Shared by all tests: worker ranks, and property tests that give the same answer every time."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["shardrt.testing.pytest_plugin"]

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of tests that are crossed over two things a half is always run, in which each value of both occurs; the rest is
    in the long series. Full sharding, which has most to go wrong, is crossed with everything. Of the doubles only
    Ascend's is another with three ranks than with two."""
    seen: dict[tuple[str, str], list[object]] = {}
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        doubles = "TestHabanaOnItsDouble" in item.nodeid or "TestNcclOnItsDouble" in item.nodeid
        if (doubles and "3-ranks" in item.name) or ("tests/ranks" in item.nodeid and _is_other_half(params)):
            item.add_marker(pytest.mark.long)
        elif "name" in params and "strategy" in params and "tests/ranks" in item.nodeid:
            places = 0
            for key in ("name", "strategy"):
                values = seen.setdefault((item.nodeid.partition("[")[0], key), [])
                if params[key] not in values:
                    values.append(params[key])
                places += values.index(params[key])
            if places % 2 and str(params["strategy"]).lower() != "full_shard":
                item.add_marker(pytest.mark.long)


def _is_other_half(params: Mapping[str, object]) -> bool:
    schedules = ("sync", "bucket", "interleaved", "priority")
    if params.get("schedule") in schedules and params.get("way") in ("plain", "ddp"):
        return (schedules.index(str(params["schedule"])) + (params["way"] == "ddp")) % 2 == 1
    if params.get("world_size") in (3, 4) and params.get("partitioner") in ("greedy", "flat"):
        return params["partitioner"] != ("flat" if params["world_size"] == 3 else "greedy")
    return False

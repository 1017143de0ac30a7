"""The hosts backend passes the same kit as every other, on two emulated hosts of two ranks each."""

from __future__ import annotations

import os
from typing import Any

from shardrt_hosts.making import make

from shardrt import Group
from shardrt.testing import BackendConformance


class TestHosts(BackendConformance):
    world_sizes = (4,)
    ways = ("direct",)  # it lacks nothing, so there is nothing to negotiate

    @classmethod
    def make(cls, group: Group) -> Any:
        os.environ["SHARDRT_HOST"] = f"host-{group.rank // 2}"
        return make(group, inside="shm", across="gloo")

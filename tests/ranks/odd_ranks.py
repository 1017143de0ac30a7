"""Ranks that misbehave as they are told, without importing anything heavy."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from shardrt.demo.rank import Report, run_rank
from shardrt.errors import PeerError


def work(settings: Mapping[str, Any], report: Report) -> Any:
    rank = int(os.environ["RANK"])
    report({"doing": settings["doing"]})
    if settings["doing"] == "answer":
        return {"rank": rank, "world_size": os.environ["WORLD_SIZE"], "threads": os.environ["OMP_NUM_THREADS"]}
    if rank == 1:
        if settings["doing"] == "raise":
            time.sleep(0.5)  # the other one is first to say that something is wrong
            raise ValueError("the shelf [bold] fell down")
        if settings["doing"] == "die":
            print("a last gasp", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    elif settings["doing"] == "raise":
        raise PeerError("rank 1 failed")
    time.sleep(600)
    return None


if __name__ == "__main__":
    run_rank(work)

"""One rank of ``shardrt bench collectives``. Started by :mod:`shardrt.launch`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from shardrt.bench.collectives import CollectivesSettings, elements, repeats
from shardrt.bench.overlap import NO_LINK
from shardrt.demo.rank import Report, run_rank


def work(told: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Measure everybody in all rounds, then check what they do."""
    import torch
    import torch.distributed as dist

    from shardrt.bench.collectives_ways import Ways, is_right

    settings = CollectivesSettings(**told["settings"])
    if settings.link != NO_LINK:  # the hosts are one machine, whose name they share
        os.environ["SHARDRT_HOST"] = os.environ["GROUP_RANK"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    try:
        with ExitStack() as cleanup:
            ways = Ways(cleanup=cleanup, largest=max(elements(size, ranks) for size in settings.megabytes))
            ways.add_all(told["backends"])
            seconds: dict[tuple[str, float, str], list[float]] = {}
            done = told["done"]
            for number in range(settings.rounds):
                for operation, size in settings.cases():
                    first = number % len(ways.there)
                    for way in ways.there[first:] + ways.there[:first]:
                        # Also meanwhile, so that a slow network is not taken for a rank that is stuck.
                        report({"doing": f"{ranks} ranks, {operation}, {size:g} MB: {way.label}", "done": done})
                        took = _time(way.run(operation, elements(size, ranks)), repeats(size))
                        seconds.setdefault((operation, size, way.name), []).append(took)
                    done += 1
            results = []
            for operation, size in settings.cases():
                for way in ways.there:
                    report({"doing": f"{ranks} ranks, checking {operation}: {way.label}", "done": done})
                    results.append(
                        {
                            "operation": operation,
                            "megabytes": size,
                            "name": way.name,
                            "label": way.label,
                            "round_seconds": seconds[operation, size, way.name],
                            "is_right": is_right(way, operation, elements(size, ranks)),
                        }
                    )
            return {"results": results, "missing": ways.missing, "torch": torch.__version__}
    finally:
        dist.destroy_process_group()


def _time(run: Callable[[], None], times: int) -> float:
    """Seconds of one run, after one that warms up, from when all ranks are there."""
    import torch.distributed as dist

    run()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - started) / times


if __name__ == "__main__":
    run_rank(work)

"""One rank of ``shardrt bench state``. Started by :mod:`shardrt.launch`."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardrt.bench.state import BEHIND, HOLDERS, PLAIN_STEPS, WAYS, StateSettings
from shardrt.demo.rank import Report, run_rank

if TYPE_CHECKING:
    from shardrt.bench.state_ways import Holder


def work(told: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Measure all ways in all rounds."""
    import torch
    import torch.distributed as dist

    from shardrt.bench.state_ways import make_holder

    settings = StateSettings(**told["settings"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    done = itertools.count(1)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    about: dict[str, Any] = {"torch": torch.__version__}
    for number in range(settings.rounds):
        for name in settings.in_turn(number):
            with ExitStack() as cleanup:
                holder = make_holder(name, settings, Path(told["directory"]) / name, cleanup)
                about |= holder.about
                for way in HOLDERS[name]:
                    runs[way].append(_measure_behind(holder) if way == BEHIND else _measure(holder, way))
                    report({"way": way, "done": next(done)})
                _clear(holder.folder)
                del holder
            gc.collect()
    dist.destroy_process_group()
    return {"runs": runs, **about}


def _measure(holder: Holder, way: str) -> dict[str, Any]:
    from shardrt.bench.memory import peak_memory

    run = holder.ways[way]
    if not way.endswith("load"):
        _clear(holder.folder)
    with peak_memory() as peak:
        seconds = _timed(run)
    return {"seconds": seconds, "peak": peak.nbytes, "file_bytes": _bytes_below(holder.folder), "more": {}}


def _measure_behind(holder: Holder) -> dict[str, Any]:
    """Steps without a save, then an asynchronous save and steps until all ranks have committed it.

    The save that makes the buffers in which state is copied is the one whose memory counts; the one that is timed
    finds them there, as all but the first of a run do.
    """
    from shardrt.bench.memory import peak_memory

    _clear(holder.folder)
    save = holder.ways[BEHIND]
    with peak_memory() as peak:
        first = time.perf_counter()
        saving = save()
        first = time.perf_counter() - first
        saving.wait()
    _clear(holder.folder)
    plain = [_timed(holder.step) for _ in range(PLAIN_STEPS)]
    plain_seconds = sorted(plain)[len(plain) // 2]
    _synchronise()
    began = time.perf_counter()
    saving = save()
    call = time.perf_counter() - began
    slower, steps = 0.0, 0
    while not _everywhere(saving.done):
        started = time.perf_counter()
        holder.step()
        slower += time.perf_counter() - started - plain_seconds
        steps += 1
    saving.wait()
    more = {
        "first_call_seconds": first,
        "call_seconds": call,
        "committed_seconds": time.perf_counter() - began,
        "steps_meanwhile": steps,
        "slower_seconds": slower,
        "step_seconds": plain_seconds,
    }
    return {
        "seconds": call + max(slower, 0.0),  # steps that happened to be faster give nothing back
        "peak": peak.nbytes,
        "file_bytes": _bytes_below(holder.folder),
        "more": more,
    }


def _timed(run: Callable[[], Any]) -> float:
    _synchronise()
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _synchronise() -> None:
    """Everybody starts at once, with a disk that has nothing to do."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()


def _everywhere(done: bool) -> bool:
    """Whether all ranks say so: they must take the same number of steps."""
    import torch
    import torch.distributed as dist

    flag = torch.tensor([int(done)])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def _clear(folder: Path) -> None:
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    dist.barrier()


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    run_rank(work)

"""One rank of ``shardrt bench growth``. Started by :mod:`shardrt.launch`.

As many ranks are started as the largest case needs. A smaller case runs on the first few of them, in a process group of
their own, while the others wait: starting sixty processes takes longer than all that is measured.
"""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardrt.bench.growth import GrowthCase
from shardrt.demo.rank import Report, run_rank

if TYPE_CHECKING:
    import torch

_EXCHANGES = 5
_STEPS = 5

Measured = dict[str, dict[str, float]]


def work(told: Mapping[str, Any], report: Report) -> list[Measured | None]:
    """Measure every case in every round; None where this rank only waited."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = float(told["patience"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit))
    cases = [GrowthCase(**case) for case in told["cases"]]
    answers: list[Measured | None] = []
    # Modules are imported and connections made when they are first used: no part of any case.
    everybody = GrowthCase(axis="ranks", size=dist.get_world_size())
    _measure(everybody, dist.group.WORLD, Path(told["directory"]) / "warm-up", limit)
    for number, case in enumerate(cases):
        report({"case": case.described, "done": number})
        started = _Clock()
        group = dist.new_group(list(range(case.ranks)), timeout=timedelta(seconds=limit))
        connected = started.stop()
        found = None
        if dist.get_rank() < case.ranks:
            # Torch makes connections when they are first used: that is its own cost, and none of ours.
            warmed = _Clock()
            dist.barrier(group)
            connected = {name: value + warmed.stop()[name] for name, value in connected.items()}
            folder = Path(told["directory"]) / f"case-{number}"
            found = {"torch's process group": connected, **_measure(case, group, folder, limit)}
            if dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
            dist.destroy_process_group(group)
        dist.barrier()
        answers.append(found)
    dist.destroy_process_group()
    return answers


class _Clock:
    """Time on the clock and of this process's threads together."""

    def __init__(self) -> None:
        self._started, self._cpu = time.perf_counter(), time.process_time()

    def stop(self, repeats: int = 1) -> dict[str, float]:
        return {
            "seconds": (time.perf_counter() - self._started) / repeats,
            "cpu": (time.process_time() - self._cpu) / repeats,
        }


def _measure(case: GrowthCase, group: Any, folder: Path, limit: float) -> Measured:
    import torch

    import shardrt

    found: Measured = {}

    def timed(what: str, run: Callable[[], Any], repeats: int = 1) -> Any:
        torch.distributed.barrier(group)
        clock = _Clock()
        for _ in range(repeats):
            answer = run()
        found[what] = clock.stop(repeats)
        return answer

    if case.ranks > 1:
        found.update(_measure_channel(group, limit, timed))
    rt = timed("Runtime", lambda: shardrt.Runtime(process_group=group, backend=case.backend, **case.options(limit)))
    with rt:
        model = _model(case)
        opt = timed("optimizer", lambda: rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3))
        assert len(rt.plan.buckets) == case.buckets or case.ranks == 1
        _step(model, opt)  # makes buffers and state
        timed("step", functools.partial(_step, model, opt), _STEPS)
        timed("save", lambda: rt.save(folder, model=model, optimizer=opt, progress=False))
        timed("load", lambda: rt.load(folder, model=model, optimizer=opt, progress=False))
        torch.distributed.barrier(group)
    if rt.rank == 0:
        found["manifest, read"] = _read_manifest(folder)
    return found


def _measure_channel(group: Any, limit: float, timed: Callable[..., Any]) -> Measured:
    """The control channel by itself, over a store that counts."""
    from shardrt.bench.growth_counting import CountingStore
    from shardrt.comm.control import StoreControl

    store = CountingStore(group.get_group_store())
    rank, size = group.rank(), group.size()
    control = timed("meeting", lambda: StoreControl(store, rank=rank, world_size=size, timeout=limit))  # type: ignore[arg-type]
    counted: Measured = {"store bytes, meeting": {"count": store.nbytes}}
    values = {"alike": "0123456789abcdef" * 8, "different": f"{rank:0128d}"}
    for which, value in values.items():
        before, operations = store.nbytes, store.operations
        timed(f"exchange, values {which}", lambda value=value: control.exchange("growth", value), _EXCHANGES)
        counted[f"store bytes, values {which}"] = {"count": (store.nbytes - before) / _EXCHANGES}
        counted[f"store operations, values {which}"] = {"count": (store.operations - operations) / _EXCHANGES}
    return counted


def _model(case: GrowthCase) -> torch.nn.Module:
    import torch

    names = [f"p{number}" for number in range(case.params)]
    model = torch.nn.Module()
    for name in names:
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(case.numel)))
    return model


def _step(model: torch.nn.Module, opt: torch.optim.Optimizer) -> None:
    import torch

    for param in model.parameters():
        param.grad = torch.ones_like(param)
    opt.step()
    opt.zero_grad()


def _read_manifest(folder: Path) -> dict[str, float]:
    from shardrt.checkpoint.manifest import Manifest

    [path] = folder.glob("*/manifest.json")
    clock = _Clock()
    Manifest.from_bytes(path.read_bytes(), where=str(path))
    return clock.stop()


if __name__ == "__main__":
    run_rank(work)

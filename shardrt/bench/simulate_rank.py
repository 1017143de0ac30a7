"""One rank of ``shardrt bench simulate``: collectives, computation and real steps, measured. Started by
:mod:`shardrt.launch`. As in :mod:`shardrt.bench.growth_rank`, smaller worlds are groups of the largest one's ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from shardrt.bench.shapes import SIZES
from shardrt.bench.simulate_events import FULL_SHARD
from shardrt.demo.rank import Report, run_rank

if TYPE_CHECKING:
    import torch

_PINGS = 50
_WARM_UP = 2


def work(told: Mapping[str, Any], report: Report) -> list[dict[str, Any] | None]:
    """Measure each world in turn; None where this rank only waited."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=float(told["patience"]))
    dist.init_process_group("gloo", timeout=limit)
    answers: list[dict[str, Any] | None] = []
    for number, ranks in enumerate(told["worlds"]):
        report({"what": f"measuring {ranks} ranks", "done": number})
        group = dist.new_group(list(range(ranks)), timeout=limit)
        found: dict[str, Any] | None = None
        if dist.get_rank() < ranks:
            measuring = _Measuring(group, told)
            found = {"collectives": measuring.collectives()}
            if number == 0:
                found["latency"] = measuring.latency()
            if ranks in told["checked"]:
                found["computation"] = measuring.computation()
                found["steps"] = {what: measuring.steps(what) for what in told["schedules"]}
            dist.destroy_process_group(group)
        dist.barrier()
        answers.append(found)
    dist.destroy_process_group()
    return answers


class _Measuring:
    """One world."""

    def __init__(self, group: Any, told: Mapping[str, Any]) -> None:
        self._group = group
        self._told = told
        self._repeats = int(told["repeats"])

    def _median(self, run: Callable[[], Any], *, warm_up: int = _WARM_UP) -> float:
        import torch.distributed as dist

        times = []
        for number in range(warm_up + self._repeats):
            dist.barrier(self._group)
            started = time.perf_counter()
            run()
            if number >= warm_up:
                times.append(time.perf_counter() - started)
        return statistics.median(times)

    def latency(self) -> float:
        """Of one small message between the first two ranks."""
        import torch
        import torch.distributed as dist

        rank, small = self._group.rank(), torch.zeros(1)
        dist.barrier(self._group)
        started = time.perf_counter()
        if rank < 2:
            for _ in range(_PINGS):
                for sender in (0, 1):
                    if rank == sender:
                        dist.send(small, group=self._group, group_dst=1 - sender)
                    else:
                        dist.recv(small, group=self._group, group_src=sender)
        return (time.perf_counter() - started) / (2 * _PINGS)

    def collectives(self) -> list[list[Any]]:
        """Operation, bytes and seconds."""
        import torch

        import shardrt

        found: list[list[Any]] = []
        with shardrt.Runtime(process_group=self._group, backend=self._told["backend"], timeout=120) as rt:
            communicator = rt.negotiate(["float32"])
            for nbytes in self._told["sizes"]:
                share = nbytes // 4 // rt.world_size
                buffer, splits = torch.zeros(share * rt.world_size), [share] * rt.world_size
                output = torch.zeros(share)
                gather = self._median(lambda: communicator.all_gather(buffer, splits).wait())  # noqa: B023
                reduce = self._median(
                    lambda: communicator.reduce_scatter(buffer, splits, output=output, average=True).wait()  # noqa: B023
                )
                found += [["all_gather", buffer.nbytes, gather], ["reduce_scatter", buffer.nbytes, reduce]]
        return found

    def _model(self) -> torch.nn.Module:
        import torch

        from shardrt.demo.model import ByteTransformer

        torch.manual_seed(0)
        size = SIZES[self._told["size"]]
        return ByteTransformer(width=size.width, layers=size.layers, heads=size.heads, context=size.context)

    def _batch(self) -> torch.Tensor:
        import torch

        size = SIZES[self._told["size"]]
        return torch.zeros(size.batch, size.context + 1, dtype=torch.long)

    def computation(self) -> dict[str, float]:
        """Of a step that communicates nothing, on all ranks at once."""
        import torch

        model, batch = self._model(), self._batch()
        bare = torch.optim.AdamW(model.parameters(), lr=1e-3)
        parts: dict[str, list[float]] = {"forward": [], "backward": [], "update": []}

        def step() -> None:
            began = time.perf_counter()
            loss = model(batch)
            forward = time.perf_counter()
            loss.backward()
            backward = time.perf_counter()
            bare.step()
            update = time.perf_counter()
            bare.zero_grad()
            for name, seconds in zip(parts, (forward - began, backward - forward, update - backward), strict=True):
                parts[name].append(seconds)

        self._median(step)
        return {name: statistics.median(times[_WARM_UP:]) for name, times in parts.items()}

    def steps(self, what: str) -> float:
        """Of real training with a schedule, or of a module that is sharded in full."""
        import torch

        import shardrt

        model, batch = self._model(), self._batch()
        schedule = "sync" if what == FULL_SHARD else what
        # The same buckets that the simulation has.
        chosen: dict[str, Any] = {"schedule": schedule, "partitioner": "bucket"}
        if what not in ("sync", FULL_SHARD):
            chosen["bucket_mb"] = self._told["bucket_mb"]
        with shardrt.Runtime(process_group=self._group, backend=self._told["backend"], timeout=120, **chosen) as rt:
            optimizer: Any
            if what == FULL_SHARD:
                model, optimizer = rt.shard(model, torch.optim.AdamW, lr=1e-3, strategy=what)
            else:
                optimizer = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3)

            def step() -> None:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()

            seconds = self._median(step)
            optimizer.finish()
        return seconds


if __name__ == "__main__":
    run_rank(work)

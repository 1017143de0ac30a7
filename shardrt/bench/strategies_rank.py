"""One rank of ``shardrt bench strategies``. Started by :mod:`shardrt.launch`."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from shardrt.bench.contest import WARM_UP_STEPS
from shardrt.bench.link import DEVICE
from shardrt.bench.overlap import NO_LINK
from shardrt.bench.shapes import SIZES
from shardrt.bench.strategies import SHARD_SIZE, STRATEGIES, TOKENS, UNSHARDED, StrategiesSettings
from shardrt.demo.rank import Report, run_rank

if TYPE_CHECKING:
    import torch

    from shardrt.bench.allocations import Allocations
    from shardrt.bench.contest_rank import Wire
    from shardrt.demo.text import Corpus

_SEED = 0


def work(told: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Count the twin, then every strategy."""
    import torch
    import torch.distributed as dist

    import shardrt
    from shardrt.bench.allocations import counted_allocations
    from shardrt.bench.contest_rank import Wire
    from shardrt.demo.text import read_corpus

    settings = StrategiesSettings(**told["settings"])
    linked = settings.link != NO_LINK
    wire = Wire(device=DEVICE if linked else "lo", both_ways=linked)
    if linked:  # the hosts are one machine, whose name they share
        os.environ["SHARDRT_HOST"] = os.environ["GROUP_RANK"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    done = itertools.count(told["done"])
    now: dict[str, Any] = {}

    def tell(strategy: str | None = None) -> None:
        """Where this rank is: after every step too, so that a slow machine is not taken for a stuck one."""
        if strategy is not None:
            now.update(strategy=strategy, done=next(done))
        report(dict(now))

    with counted_allocations() as allocations:
        counting = _Counting(settings, allocations, wire, read_corpus(), tell)
        answer: dict[str, Any] = {**_about(counting.fresh_model()), "torch": torch.__version__}
        tell(UNSHARDED)
        answer["runs"] = {UNSHARDED: counting.twin()}
        answer["activation_bytes"] = answer["runs"][UNSHARDED]["activation_bytes"]
        for name in told["strategies"]:
            tell(name)
            answer["runs"][name] = counting.strategy(name)
        with shardrt.Runtime(**counting.chosen(), backend="gloo", device="cpu") as rt:
            answer |= {"schedule": rt.schedule.name, "partitioner": rt.partitioner.name}
    dist.destroy_process_group()
    return answer


def _about(model: torch.nn.Module) -> dict[str, int]:
    from shardrt.sharding.units import find_units

    sizes = {name: param.nbytes for name, param in model.named_parameters()}
    root, *others = [sum(sizes[name] for name in unit.params) for unit in find_units(model)]
    return {
        "parameters": sum(param.numel() for param in model.parameters()),
        "parameter_bytes": sum(sizes.values()),
        "root_bytes": root,
        "unit_bytes": max(root, *others),
    }


class _Counting:
    """The same training for the twin and for every strategy."""

    def __init__(
        self,
        settings: StrategiesSettings,
        allocations: Allocations,
        wire: Wire,
        corpus: Corpus,
        tell: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._allocations = allocations
        self._wire = wire
        self._corpus = corpus
        self._tell = tell

    def fresh_model(self) -> torch.nn.Module:
        """The same one each time."""
        import torch

        from shardrt.demo.model import ByteTransformer

        size = SIZES[self._settings.size]
        torch.manual_seed(_SEED)
        return ByteTransformer(width=size.width, layers=size.layers, heads=size.heads, context=size.context)

    def chosen(self) -> dict[str, Any]:
        """Arguments of the runtime that were asked for."""
        asked = {"schedule": self._settings.schedule, "partitioner": self._settings.partitioner}
        return {name: value for name, value in asked.items() if value is not None}

    def twin(self) -> dict[str, Any]:
        """Train alone, with the plain optimizer."""
        import torch

        from shardrt.bench.contest_rank import LR

        before = self._begin()
        model = self.fresh_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        return self._count(before, model, optimizer, lambda: None, lambda: 0)

    def strategy(self, name: str) -> dict[str, Any]:
        """Train with the others."""
        import torch

        import shardrt
        from shardrt.bench.contest_rank import LR

        before = self._begin()
        grouped = STRATEGIES[name].hybrid and self._settings.link == NO_LINK  # with a link the hosts are the groups
        more: dict[str, Any] = {"shard_size": SHARD_SIZE} if grouped else {}
        more["divide_units"] = self._settings.divide_units
        more["reshard_after_forward"] = True  # as the formulas have it: every unit is gathered twice
        more["prefetch"] = None if self._settings.prefetch == "none" else self._settings.prefetch
        with ExitStack() as cleanup:
            # Gloo by name: the network device counts what it sends, and nothing of what goes through shared memory.
            rt = cleanup.enter_context(shardrt.Runtime(**self.chosen(), backend="gloo", device="cpu"))
            model, optimizer = rt.shard(self.fresh_model(), torch.optim.AdamW, lr=LR, strategy=name, **more)
            return self._count(before, model, optimizer, optimizer.finish, lambda: rt.traffic.sent)

    def _begin(self) -> int:
        gc.collect()
        return self._allocations.begin()

    def _count(
        self,
        before: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        settle: Callable[[], None],
        sent: Callable[[], int],
    ) -> dict[str, Any]:
        activations = 0
        peaks: dict[str, int] = {}

        def phase_over(name: str) -> None:
            peaks[name] = max(peaks.get(name, 0), self._allocations.peak - before)
            self._allocations.begin()

        def train(batch: torch.Tensor) -> None:
            nonlocal activations
            live = self._allocations.begin()
            loss = model(batch)
            activations = max(activations, self._allocations.live - live)
            phase_over("forward")
            loss.backward()
            phase_over("backward")
            optimizer.step()
            optimizer.zero_grad()
            settle()
            phase_over("step")
            self._tell()

        for batch in self._batches(range(WARM_UP_STEPS)):
            train(batch)
        gc.collect()
        peaks.clear()
        sent_before = sent()
        device = []
        for batch in self._batches(range(WARM_UP_STEPS, WARM_UP_STEPS + self._settings.steps)):
            start = self._wire.count()
            train(batch)
            end = self._wire.count()
            device.append(None if start is None or end is None else end - start)
        sent_after = sent()
        gc.collect()
        return {
            "peaks": peaks,
            "rest_bytes": self._allocations.live - before,
            "activation_bytes": activations,
            "sent_bytes": (sent_after - sent_before) / self._settings.steps,
            "device_bytes": device,
        }

    def _batches(self, steps: range) -> Iterator[torch.Tensor]:
        rank = int(os.environ["RANK"])
        for step in steps:
            yield self._corpus.windows(seed=_SEED, step=step, rank=rank, count=1, length=TOKENS + 1)


if __name__ == "__main__":
    run_rank(work)

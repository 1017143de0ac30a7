"""One rank of ``shardrt bench peers``: every contestant in every round. Started by :mod:`shardrt.launch`."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from shardrt.bench.peers import CONTESTANTS, DDP, SIZES, TORCH_ZERO, WARM_UP_STEPS, PeersSettings
from shardrt.demo.rank import Report, run_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from shardrt.demo.text import Corpus

_SEED = 0
_LR = 3e-4
_COUNTERS = Path("/proc/net/dev")

StateBytes = Callable[[], int]


def work(settings: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Measure; every rank reports each step, so that one that is stuck is missed by name."""
    import torch
    import torch.distributed as dist

    from shardrt.demo.text import read_corpus
    from shardrt.demo.training import digest_of, largest_difference

    asked = PeersSettings(**settings)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    corpus = read_corpus()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
    reference: torch.nn.Module | None = None
    done = itertools.count(1)
    try:
        for number in range(asked.rounds):
            for name in _in_turn(number):
                model = _fresh_model(asked)
                run = _measure(name, model, asked, corpus, functools.partial(_tell, report, name, done))
                if reference is None:
                    assert name == DDP
                    reference = model
                run["largest_difference"] = largest_difference(model, reference)
                run["digest"] = digest_of(model)
                runs[name].append(run)
                del model
                gc.collect()  # so that two contestants are never in memory at once, but for the reference
    finally:
        dist.destroy_process_group()
    assert reference is not None
    return {
        "runs": runs,
        "parameters": sum(param.numel() for param in reference.parameters()),
        "parameter_bytes": sum(param.nbytes for param in reference.parameters()),
        "torch": torch.__version__,
    }


def _tell(report: Report, contestant: str, done: Iterator[int]) -> None:
    report({"contestant": contestant, "done": next(done)})


def _in_turn(number: int) -> list[str]:
    """The contestants, starting with another one in each round; the first starts with what all are compared to."""
    names = list(CONTESTANTS)
    first = number % len(names)
    return names[first:] + names[:first]


def _fresh_model(settings: PeersSettings) -> torch.nn.Module:
    import torch

    from shardrt.demo.model import ByteTransformer

    size = SIZES[settings.size]
    torch.manual_seed(_SEED)
    return ByteTransformer(width=size.width, layers=size.layers, heads=size.heads, context=size.context)


@attrs.frozen(kw_only=True, eq=False)
class _Trainer:
    """What a contestant makes of a model."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    state_bytes: StateBytes


def _trainer(name: str, model: torch.nn.Module, cleanup: ExitStack) -> _Trainer:
    import torch

    import shardrt
    from shardrt.demo.training import state_bytes

    trained = model
    if name in (DDP, TORCH_ZERO, "shardrt_under_ddp"):
        trained = torch.nn.parallel.DistributedDataParallel(model)
    if name == DDP:
        optimizer = torch.optim.AdamW(trained.parameters(), lr=_LR)
        return _Trainer(model=trained, optimizer=optimizer, state_bytes=lambda: state_bytes([optimizer]))
    if name == TORCH_ZERO:
        zero = _torch_zero(trained)
        return _Trainer(model=trained, optimizer=zero, state_bytes=lambda: state_bytes([zero.optim]))
    partitioner = "flat" if name == "shardrt_flat" else "greedy"
    # Gloo by name: a faster backend of ours for one machine would not be a comparison of ZeRO-1.
    rt = cleanup.enter_context(shardrt.Runtime(partitioner=partitioner, backend="gloo", device="cpu"))
    ours = rt.optimizer(
        trained.named_parameters(),
        torch.optim.AdamW,
        gradients="reduced" if name == "shardrt_under_ddp" else "average",
        lr=_LR,
    )
    return _Trainer(model=trained, optimizer=ours, state_bytes=ours.state_bytes)


def _torch_zero(model: torch.nn.Module) -> Any:
    import torch

    with warnings.catch_warnings():
        # Importing it compiles functions with an interface that torch itself has deprecated.
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.", category=DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=_LR)


def _measure(
    name: str, model: torch.nn.Module, settings: PeersSettings, corpus: Corpus, on_step: Callable[[], None]
) -> dict[str, Any]:
    size, rank = SIZES[settings.size], int(os.environ["RANK"])
    with ExitStack() as cleanup:
        trainer = _trainer(name, model, cleanup)

        def train(steps: range) -> list[float]:
            seconds = []
            for step in steps:
                batch = corpus.windows(seed=_SEED, step=step, rank=rank, count=size.batch, length=size.context + 1)
                seconds.append(_step(trainer, batch))
                on_step()
            return seconds

        train(range(WARM_UP_STEPS))
        with _no_collecting():
            before = _loopback_bytes()
            seconds = train(range(WARM_UP_STEPS, WARM_UP_STEPS + settings.steps))
            after = _loopback_bytes()
        return {
            "step_seconds": seconds,
            "wire_bytes": None if before is None or after is None else after - before,
            "optimizer_bytes": trainer.state_bytes(),
        }


def _step(trainer: _Trainer, batch: torch.Tensor) -> float:
    started = time.perf_counter()
    loss = trainer.model(batch)
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return time.perf_counter() - started


def _loopback_bytes() -> int | None:
    """Bytes that the machine has sent to itself, read while no rank sends; None where nobody counts them."""
    import torch.distributed as dist

    dist.barrier()
    count = _read_counter(_COUNTERS.read_text()) if _COUNTERS.exists() else None
    dist.barrier()
    return count


def _read_counter(table: str) -> int | None:
    for line in table.splitlines():
        device, _, counts = line.partition(":")
        if device.strip() == "lo":
            return int(counts.split()[0])
    return None


@contextmanager
def _no_collecting() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


if __name__ == "__main__":
    run_rank(work)

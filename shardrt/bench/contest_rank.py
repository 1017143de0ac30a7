"""What one rank of a contest does: every contestant in every round. See :mod:`shardrt.bench.contest`."""

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
from typing import Any, Protocol

import attrs
import torch
import torch.distributed as dist

from shardrt.bench.contest import DDP, TORCH_ZERO, WARM_UP_STEPS, ContestSettings
from shardrt.bench.models import build_model
from shardrt.bench.updates import UpdateClock, updates_timed
from shardrt.demo.rank import Report
from shardrt.demo.text import Corpus, read_corpus
from shardrt.demo.training import digest_of, largest_difference, state_bytes

LR = 3e-4
_SEED = 0
_COUNTERS = Path("/proc/net/dev")
_SENT_COLUMN = 8


class Steps(Protocol):
    """What the loop needs of an optimizer."""

    def step(self) -> Any:
        """Update the parameters."""

    def zero_grad(self) -> None:
        """Forget the gradients."""


def _backward(loss: torch.Tensor) -> None:
    torch.autograd.backward(loss)


@attrs.frozen(kw_only=True, eq=False)
class Trainer:
    """What a contestant makes of a model."""

    model: torch.nn.Module
    optimizer: Steps
    state_bytes: Callable[[], int]
    backward: Callable[[torch.Tensor], None] = _backward
    settle: Callable[[], None] = lambda: None
    """Waits until the last step is complete in all parameters, where ``step`` itself does not."""


MakeTrainer = Callable[[str, torch.nn.Module, ExitStack], Trainer]
"""From a contestant's name and a fresh model; what is put on the stack is closed when the contestant is done."""


def make_peer(name: str, model: torch.nn.Module, *, bucket_mb: float | None = None) -> Trainer:
    """DDP with the plain optimizer, or with torch's ZeRO."""
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    if name == DDP:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=LR)
        return Trainer(model=ddp, optimizer=optimizer, state_bytes=lambda: state_bytes([optimizer]))
    assert name == TORCH_ZERO
    with warnings.catch_warnings():
        # Importing it compiles functions with an interface that torch itself has deprecated.
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.", category=DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    zero = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.AdamW, lr=LR)
    return Trainer(model=ddp, optimizer=zero, state_bytes=lambda: state_bytes([zero.optim]))


@attrs.frozen(kw_only=True)
class Wire:
    """The network device that ranks talk through, as the system counts on it."""

    device: str
    both_ways: bool
    """What is sent on loopback is received on it: those bytes are counted once."""

    def count(self) -> int | None:
        """Bytes so far, read while no rank sends; None where nobody counts them."""
        dist.barrier()
        found = self.read(_COUNTERS.read_text()) if _COUNTERS.exists() else None
        dist.barrier()
        return found

    def read(self, table: str) -> int | None:
        """From the system's table of all devices.

        Example:
            >>> from shardrt.bench.contest_rank import Wire
            >>> table = "  lo: 70 1 0 0 0 0 0 0 70 1 0 0 0 0 0 0" + chr(10) + "eth0: 5 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0"
            >>> [Wire(device=name, both_ways=name != "lo").read(table) for name in ("lo", "eth0", "eth1")]
            [70, 14, None]
        """
        for line in table.splitlines():
            device, _, counts = line.partition(":")
            if device.strip() == self.device:
                columns = [int(count) for count in counts.split()]
                return columns[0] + columns[_SENT_COLUMN] * self.both_ways
        return None


@attrs.frozen(kw_only=True)
class StepTimes:
    """For each step, on this rank."""

    seconds: list[float]
    updates: list[float]
    """The part that AdamW updated, in whichever thread."""


@attrs.frozen(kw_only=True, eq=False)
class Training:
    """The same training for every contestant."""

    settings: ContestSettings
    corpus: Corpus
    tell: Callable[[str], None]
    """Called with the contestant's name after each step, so that a rank that is stuck is missed by name."""
    clock: UpdateClock

    def fresh_model(self) -> torch.nn.Module:
        """The same one each time."""
        torch.manual_seed(_SEED)
        return build_model(self.settings.shape)

    def train(self, name: str, trainer: Trainer, steps: range) -> StepTimes:
        """Take steps; what the last one leaves open is waited for, and counts as its time."""
        shape, rank = self.settings.shape, int(os.environ["RANK"])
        seconds, updates = [], []
        for step in steps:
            batch = self.corpus.windows(seed=_SEED, step=step, rank=rank, count=shape.batch, length=shape.context + 1)
            updated = self.clock.read()
            started = time.perf_counter()
            loss = trainer.model(batch)
            trainer.backward(loss)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            seconds.append(time.perf_counter() - started)
            updates.append(self.clock.read() - updated)
            self.tell(name)
        started = time.perf_counter()
        trainer.settle()
        seconds[-1] += time.perf_counter() - started
        return StepTimes(seconds=seconds, updates=updates)


@contextmanager
def training(settings: ContestSettings, report: Report) -> Iterator[Training]:
    """A process group and all that contestants share; every rank reports each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    done = itertools.count(1)
    try:
        with updates_timed() as clock:
            yield Training(
                settings=settings,
                corpus=read_corpus(),
                tell=lambda name: report({"contestant": name, "done": next(done)}),
                clock=clock,
            )
    finally:
        dist.destroy_process_group()


def run_rounds(shared: Training, make_trainer: MakeTrainer, wire: Wire) -> dict[str, Any]:
    """Measure every contestant in every round; what a rank brings home, see :func:`shardrt.bench.contest.findings`."""
    settings = shared.settings
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in settings.contestants}
    reference: torch.nn.Module | None = None
    for number in range(settings.rounds):
        for name in settings.in_turn(number):
            model = shared.fresh_model()
            run = _measure(name, shared, functools.partial(make_trainer, name, model), wire)
            if reference is None:
                assert name == DDP
                reference = model
            run["largest_difference"] = largest_difference(model, reference)
            run["digest"] = digest_of(model)
            runs[name].append(run)
            del model
            gc.collect()  # so that two contestants are never in memory at once, but for the reference
    assert reference is not None
    return {
        "runs": runs,
        "parameters": sum(param.numel() for param in reference.parameters()),
        "parameter_bytes": sum(param.nbytes for param in reference.parameters()),
        "torch": torch.__version__,
    }


def _measure(name: str, shared: Training, make: Callable[[ExitStack], Trainer], wire: Wire) -> dict[str, Any]:
    with ExitStack() as cleanup:
        return time_steps(name, shared, make(cleanup), wire)


def time_steps(name: str, shared: Training, trainer: Trainer, wire: Wire) -> dict[str, Any]:
    """Warm up, then take steps under the clock."""
    shared.train(name, trainer, range(WARM_UP_STEPS))
    with _no_collecting():
        before = wire.count()
        times = shared.train(name, trainer, range(WARM_UP_STEPS, WARM_UP_STEPS + shared.settings.steps))
        after = wire.count()
    return {
        "step_seconds": times.seconds,
        "update_seconds": times.updates,
        "wire_bytes": None if before is None or after is None else after - before,
        "optimizer_bytes": trainer.state_bytes(),
    }


@contextmanager
def _no_collecting() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

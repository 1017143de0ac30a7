"""A run that kills itself at a chosen point: what the series of kills is made of.

The place that a run saves to is wrapped. The wrapper knows what each operation is for (which *phase* of saving it is),
counts the system calls that are made on its behalf, and can end its own process before one of them, after it or, of a
write, in the middle. Production code knows nothing of it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import attrs
import torch
import torch.distributed as dist

import shardrt
from shardrt.checkpoint.series import Series
from shardrt.checkpoint.writing import Staging
from shardrt.choosing import choose_place
from shardrt.comm.control import StoreControl

STEPS = 9
SAVES = {2: 1, 4: 2, 6: 3, 8: 4}
"""The number of each save, by its step."""
KEEP_LAST = 2

BEFORE_COMMIT = ("beginning", "shard, bytes", "shard, naming", "manifest, before its rename", "copying")
AFTER_POINTER = ("removing the note", "removing a manifest", "removing files")
PHASES = (
    "between steps",
    "backward",
    "step",
    *BEFORE_COMMIT,
    "exchange",
    "manifest, after its rename",
    "pointer",
    *AFTER_POINTER,
)
TRAINING = PHASES[:3]


@attrs.frozen(kw_only=True)
class Point:
    """Where a rank ends: the call of that number, in a phase of a save (or of a training step)."""

    phase: str
    at: int
    """The save's number, or the step."""
    call: int = 0
    how: str = "before"


class Watch:
    """Counts the calls of each phase, and ends the process at the point that is wanted."""

    def __init__(self, point: Point | None) -> None:
        self.point = point
        self.save = 0
        self.counts: Counter[tuple[str, int]] = Counter()
        self._here = threading.local()

    def reached(self, phase: str, at: int, how: tuple[str, ...] = ("before",)) -> str | None:
        """Count a call; says how to end in it, if this is where."""
        number = self.counts[phase, at]
        self.counts[phase, at] += 1
        point = self.point
        if point is None or (point.phase, point.at, point.call) != (phase, at, number):
            return None
        return point.how if point.how in how else how[0]

    @contextmanager
    def working_on(self, kind: str, save: int) -> Iterator[None]:
        """System calls of this thread are of this kind now."""
        self._here.kind, self._here.save, self._here.renamed = kind, save, False
        try:
            yield
        finally:
            self._here.kind = None

    def system_call(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """A system call that is counted, and may be the last one."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            kind = getattr(self._here, "kind", None)
            if kind is None:
                return real(*args, **kwargs)
            ways = ("before", "middle", "after") if call == "write" else ("before", "after")
            how = self.reached(self._phase(kind, call), self._here.save, ways)
            if how == "before":
                end_this_process()
            if how == "middle":
                real(args[0], bytes(args[1])[: len(args[1]) // 2])
                end_this_process()
            result = real(*args, **kwargs)
            self._here.renamed |= call == "replace"
            if how == "after":
                end_this_process()
            return result

        return counted

    def _phase(self, kind: str, call: str) -> str:
        if kind == "shard":
            return "shard, bytes" if call in ("write", "mkdir") else "shard, naming"
        if kind == "manifest":
            return "manifest, after its rename" if self._here.renamed else "manifest, before its rename"
        return kind

    def exchange(self, channel: StoreControl, topic: str, *args: Any, **kwargs: Any) -> list[Any]:
        """An exchange between ranks that is part of a save."""
        if topic not in TOPICS:
            return _exchange(channel, topic, *args, **kwargs)
        if topic == "save":
            self._exchanging = self.save
        how = self.reached("exchange", self._exchanging, ("before", "after"))
        if how == "before":
            end_this_process()
        result = _exchange(channel, topic, *args, **kwargs)
        if how == "after":
            end_this_process()
        return result

    def copy(self, staging: Staging, tensors: Any) -> Any:
        """The copies of an asynchronous save, which may end half-way."""
        if self.reached("copying", self.save):
            _copy(staging, dict(list(tensors.items())[: len(tensors) // 2]))
            end_this_process()
        return _copy(staging, tensors)


_exchange = StoreControl.exchange
_copy = Staging.copy
TOPICS = (
    "save",
    "beginning a checkpoint",
    "name of the checkpoint",
    "copying",
    "writing a checkpoint's files",
    "what was written",
    "committing a checkpoint",
    "after a checkpoint",
)


def end_this_process() -> None:
    """As a machine that loses power does it: nothing is flushed, closed or said."""
    os.kill(os.getpid(), signal.SIGKILL)


class WatchedFile:
    """A file of a watched place."""

    def __init__(self, watch: Watch, save: int, make: Callable[[], Any]) -> None:
        self._watch, self._save = watch, save
        with watch.working_on("shard", save):
            self._inner = make()

    def write(self, data: memoryview | bytes) -> None:
        with self._watch.working_on("shard", self._save):
            self._inner.write(data)

    def commit(self) -> None:
        with self._watch.working_on("shard", self._save):
            self._inner.commit()

    def abandon(self) -> None:
        self._inner.abandon()


class WatchedPlace:
    """A place that tells the watch what its operations are for."""

    _PUBLISHED = {"writing.json": "beginning", "manifest.json": "manifest", "latest.json": "pointer"}  # noqa: RUF012
    _REMOVED = {"writing.json": "removing the note", "manifest.json": "removing a manifest"}  # noqa: RUF012

    def __init__(self, inner: Any, watch: Watch) -> None:
        self._inner, self._watch, self._save = inner, watch, watch.save
        self.name, self.root = inner.name, inner.root

    def create(self, path: str) -> WatchedFile:
        return WatchedFile(self._watch, self._save, lambda: self._inner.create(path))

    def publish(self, path: str, data: bytes) -> None:
        with self._watch.working_on(self._PUBLISHED[path.rpartition("/")[2]], self._save):
            self._inner.publish(path, data)

    def remove(self, path: str) -> None:
        with self._watch.working_on(self._REMOVED.get(path.rpartition("/")[2], "removing files"), self._save):
            self._inner.remove(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Put the watch in place, and take it away again from a process that goes on."""
    with ExitStack() as patches:
        for call in ("write", "mkdir", "fsync", "replace", "unlink", "rmdir"):
            patches.enter_context(mock.patch.object(os, call, watch.system_call(call, getattr(os, call))))
        patches.enter_context(mock.patch.object(StoreControl, "exchange", lambda *a, **k: watch.exchange(*a, **k)))
        patches.enter_context(mock.patch.object(Staging, "copy", lambda *a: watch.copy(*a)))
        yield


class Net(torch.nn.Module):
    """Small, with tensors that are cut between ranks, a buffer, and randomness in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 9)
        self.norm = torch.nn.LayerNorm(9)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.drop = torch.nn.Dropout(0.3)
        self.last = torch.nn.Linear(9, 3)

    seen: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


class EndingAdamW(torch.optim.AdamW):
    """May end the process when the shards of this rank are updated and nobody has heard of it."""

    watch: Watch | None = None
    number = 0

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        type(self).number += 1
        if self.watch is not None and self.watch.reached("step", type(self).number):
            end_this_process()
        return result


def train(path: str, asynchronous: bool, timeout: float, victim: int | None = None, point: Point | None = None) -> Any:
    """Go on from the latest checkpoint, if there is one, to the end; rank ``victim`` ends at the point.

    Returns what was found, and digests of this rank's state when it was loaded, after each step and at the end.
    """
    rank = dist.get_rank()
    watch = Watch(point if rank == victim else None)
    make_place = choose_place(shardrt.load_registry())
    dist.barrier()  # a process that was just started has imported everything now, and need not hurry
    EndingAdamW.watch = watch
    with (
        watching(watch),
        shardrt.Runtime(
            partitioner="flat", timeout=timeout, place=lambda root: WatchedPlace(make_place(root), watch)
        ) as rt,
    ):
        torch.manual_seed(0)
        model = Net()
        opt = rt.optimizer(model.named_parameters(), EndingAdamW, lr=0.05, elementwise=True)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)
        torch.manual_seed(100 + rank)
        found = rt.load(path, model=model, optimizer=opt, missing_ok=True)
        if found is not None:
            schedule.load_state_dict(found["schedule"])
        begin = 0 if found is None else int(found["step"])
        EndingAdamW.number = begin
        digests = {str(begin): digest(model, opt)}
        last = None
        for step in range(begin + 1, STEPS + 1):
            if watch.reached("between steps", step):
                end_this_process()
            loss = model(torch.randn(8, 6)).pow(2).mean()
            loss.register_hook(lambda grad, step=step: in_backward(watch, step, grad))
            loss.backward()
            opt.step()
            opt.zero_grad()
            schedule.step()
            digests[str(step)] = digest(model, opt)
            if step in SAVES:
                watch.save = SAVES[step]
                extra = {"step": step, "schedule": schedule.state_dict()}
                last = rt.save(
                    path, model=model, optimizer=opt, extra=extra, asynchronous=asynchronous, keep_last=KEEP_LAST
                )
        if last is not None:
            last.wait()
        rt.differs("the end", 0)  # whoever was lost in the last save is missed here
    series = Series(make_place(path))
    return {
        "found": None if found is None else begin,
        "digests": digests,
        "counts": [[phase, at, count] for (phase, at), count in watch.counts.items()],
        "complete": [name.step for name in series.committed()],
        "all": [name.step for name in series.names()],
    }


def in_backward(watch: Watch, step: int, grad: torch.Tensor) -> torch.Tensor:
    """A gradient that may never be there."""
    if watch.reached("backward", step):
        end_this_process()
    return grad


def _bytes_of(value: Any) -> bytes:
    """Tensors by their bits; numbers, and whatever a changed manifest put in their place, by what they say."""
    if isinstance(value, torch.Tensor):
        return value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return repr(value).encode()


def digest(model: torch.nn.Module, opt: Any) -> str:
    """Every bit of what this rank knows: model, its share of the optimizer's state, options, random state."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    kept = opt.local_state()
    for shard, stepped in opt.owned():
        found.update(repr(shard).encode())
        for key, value in sorted(kept.get(stepped, {}).items()):
            found.update(key.encode() + _bytes_of(value))
    options = [{key: value for key, value in group.items() if key != "params"} for group in opt.param_groups]
    found.update(repr(options).encode() + torch.get_rng_state().numpy().tobytes())
    return found.hexdigest()

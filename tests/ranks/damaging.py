"""A checkpoint to be damaged: saved by several ranks, loaded by any number, and told apart from what it was."""

from __future__ import annotations

import errno
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import torch
from fsspec.implementations.memory import MemoryFileSystem

import shardrt
from shardrt.choosing import choose_place
from shardrt.errors import ShardrtError
from tests.ranks.crashing import Net, digest


def build(rt: shardrt.Runtime, seed: int = 0) -> tuple[torch.nn.Module, Any]:
    """A model and its optimizer, the same on all ranks."""
    torch.manual_seed(seed)
    model = Net()
    return model, rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=0.05)


def train_step(model: torch.nn.Module, opt: Any) -> None:
    """One update."""
    model(torch.randn(8, 6)).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()


def save_some(path: str, saves: int = 2) -> str:
    """Save after each of the first steps."""
    with shardrt.Runtime(partitioner="flat", timeout=20) as rt:
        model, opt = build(rt)
        for step in range(saves):
            train_step(model, opt)
            rt.save(path, model=model, optimizer=opt, extra={"step": step, "mean": torch.ones(3)})
        return digest(model, opt)


def try_to_load(path: str, step: int | None = None) -> dict[str, Any]:
    """Load into a run that has gone another way, and tell what came of it."""
    with shardrt.Runtime(partitioner="flat", timeout=20) as rt:
        model, opt = build(rt, seed=1)
        train_step(model, opt)
        return load_into(rt, model, opt, path, step)


def load_into(rt: shardrt.Runtime, model: torch.nn.Module, opt: Any, path: str, step: int | None = None) -> Any:
    """The error of a load, if there was one, and whether anything has changed."""
    before = digest(model, opt)
    try:
        extra = rt.load(path, model=model, optimizer=opt, step=step)
    except ShardrtError as error:
        text = f"{type(error).__name__}: {error}"
        return {"error": text, "unchanged": digest(model, opt) == before}
    return {"error": None, "step": extra["step"], "unchanged": digest(model, opt) == before}


class FailingFile:
    """A file on a disk that is full, or broken."""

    def __init__(self, inner: Any, failing: FailingPlace) -> None:
        self._inner, self._failing = inner, failing

    def write(self, data: memoryview | bytes) -> None:
        self._failing.room -= len(data)
        if self._failing.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._inner.write(data)

    def commit(self) -> None:
        self._failing.fail("commit")
        self._inner.commit()

    def abandon(self) -> None:
        self._inner.abandon()


class FailingPlace:
    """A place that fails in one kind of operation while ``fault`` says so."""

    def __init__(self, inner: Any, fault: str | None) -> None:
        self._inner, self._fault = inner, fault
        self.name, self.root = inner.name, inner.root
        self.room = 500 if fault == "full" else 2**60

    def fail(self, operation: str) -> None:
        if operation == self._fault:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def create(self, path: str) -> FailingFile:
        return FailingFile(self._inner.create(path), self)

    def publish(self, path: str, data: bytes) -> None:
        self.fail(path.rpartition("/")[2])
        self._inner.publish(path, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class FullDisk(MemoryFileSystem):  # type: ignore[misc]
    """A file system of fsspec whose disk is full as soon as a file has a few hundred bytes."""

    protocol = "fulldisk"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        if "w" in mode:
            plain = file.write

            def write(data: Any) -> Any:
                if file.tell() + len(data) > 500:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return plain(data)

            file.write = write
        return file


FAULTS = ("full", "commit", "writing.json", "manifest.json", "size limit", "read only", "full by fsspec")


@contextmanager
def nobody() -> Iterator[None]:
    """Without a superuser's rights, which would write to anything."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def reachable_directory() -> Iterator[str]:
    """One that everybody may read: the directories of tests are their user's alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield folder


def save_on_a_bad_disk(path: str, fault: str, asynchronous: bool, culprit: int) -> dict[str, Any]:
    """Save, fail to save on one rank's account, train on, save again; tell each error and what there is to load."""
    make, faults = choose_place(shardrt.load_registry()), {"now": None}
    told: list[str] = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(step: int, where: str = path) -> None:
        saving = rt.save(where, model=model, optimizer=opt, extra={"step": step}, asynchronous=asynchronous)
        saving.wait()

    def note(call: Callable[[], Any]) -> None:
        try:
            call()
        except ShardrtError as error:
            told.append(f"{type(error).__name__}: {error}")

    with shardrt.Runtime(
        partitioner="flat", timeout=20, place=lambda root: FailingPlace(make(root), faults["now"])
    ) as rt:
        model, opt = build(rt)
        train_step(model, opt)
        save(1)
        if rt.rank == culprit:
            faults["now"] = fault  # type: ignore[assignment]
            if fault == "size limit":
                resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
        train_step(model, opt)
        if fault == "read only":
            if rt.rank == 0:
                Path(path).chmod(0o555)
            with nobody() if os.geteuid() == 0 else nullcontext():
                note(lambda: save(2))
            if rt.rank == 0:
                Path(path).chmod(0o755)
        elif fault == "full by fsspec":
            fsspec.register_implementation("fulldisk", FullDisk, clobber=True)
            note(lambda: save(2, "fulldisk://run"))
        elif asynchronous:
            # Nobody waits: the next save tells, on every rank.
            note(lambda: rt.save(path, model=model, optimizer=opt, extra={"step": 2}, asynchronous=True))
            note(lambda: save(2))
        else:
            note(lambda: save(2))
        faults["now"] = None
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        names = sorted(entry.name for entry in Path(path).iterdir())
        kept = digest(model, opt)
        old = rt.load(path, model=model, optimizer=opt)["step"]
        train_step(model, opt)
        save(3)
        new = rt.load(path, model=model, optimizer=opt)["step"]
        return {"told": told, "names": names, "old": old, "new": new, "kept": kept}

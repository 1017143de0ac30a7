"""Which lines of ours make tensors with memory of their own, on whatever thread."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardrt.comm.thread import OperationThread

ROOT = Path(__file__).resolve().parents[1]
_OURS = (str(ROOT / "shardrt"), str(ROOT / "plugins"))
_TRAINERS = (str(ROOT / "shardrt" / "testing"), str(ROOT / "shardrt" / "demo"))
TRAINER = "the trainer's own"


class AllocationLines(TorchDispatchMode):
    """Bytes by ``file:line operator``."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_memory(one) for one in _tensors((args, kwargs or {}))}
        for made in _tensors(result):
            if _memory(made) not in given and made.untyped_storage().nbytes():
                self.bytes[f"{_line()} {func.overloadpacket.__name__}"] += made.untyped_storage().nbytes()
        return result


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _line() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OURS) and not name.startswith(_TRAINERS):
            return f"{Path(name).relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return TRAINER


@contextmanager
def watched_lines() -> Iterator[AllocationLines]:
    """Watch this thread, and what communicators and schedules run on theirs."""
    lines = AllocationLines()
    submit = OperationThread.submit
    resize = torch.UntypedStorage.resize_

    def watching(run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            with lines:
                return run(*arguments)

        return watched

    def submit_watched(self: OperationThread, what: str, run: Callable[[], None], **more: Any) -> Any:
        return submit(self, what, watching(run), **more)

    def resize_watched(storage: Any, nbytes: int) -> Any:  # no operator, so no dispatch
        if nbytes > storage.nbytes():
            lines.bytes[f"{_line()} resize_"] += nbytes
        return resize(storage, nbytes)

    OperationThread.submit = submit_watched  # type: ignore[method-assign]
    torch.UntypedStorage.resize_ = resize_watched  # type: ignore[method-assign]
    try:
        with lines:
            yield lines
    finally:
        OperationThread.submit = submit  # type: ignore[method-assign]
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

"""Whole tensors in memory that a file stands behind, for writers that must be handed whole tensors.

Note [File-backed memory]: ``torch.save`` and ``torch.distributed.checkpoint`` take tensors, not pieces. A tensor over a
mapped file is one whose pages the system may write back and drop, so a state larger than memory can be written. The
files lie beside what is being written, since the usual place for temporary files may itself be memory, and lose their
names as soon as they are mapped, so that nothing is left behind even by a process that is killed.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from shardrt.errors import CheckpointError, StateError
from shardrt.state.portable import LazyTensor, dtype_called

WINDOW_BYTES = 8 << 20
_SMALL = 4096
_PLAIN = (bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter)


class FileBacked:
    """Makes whole tensors of lazy ones, each once: two names of one lazy tensor get one tensor.

    Example:
        >>> import pathlib, torch
        >>> from shardrt.interchange.backed import FileBacked
        >>> from shardrt.state.portable import LazyTensor
        >>> FileBacked(pathlib.Path(".")).whole(LazyTensor.of(torch.arange(3)))
        tensor([0, 1, 2])
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[int, tuple[LazyTensor, torch.Tensor]] = {}

    def whole(self, lazy: LazyTensor) -> torch.Tensor:
        """All of it. See Note [File-backed memory]."""
        held = self._made.get(id(lazy))
        if held is None:
            held = self._made[id(lazy)] = (lazy, self._assemble(lazy))
        return held[1]

    def tree(self, value: Any) -> Any:
        """A value with whole tensors in place of the lazy ones in it. What only a pickle could hold is refused."""
        if isinstance(value, LazyTensor):
            return self.whole(value)
        if isinstance(value, dict):
            return {self.tree(key): self.tree(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.tree(each) for each in value]
        if isinstance(value, tuple):
            return tuple(self.tree(each) for each in value)
        if value is None or type(value) in _PLAIN:
            return value
        raise StateError(
            f"the state holds a {type(value).__qualname__}, which a reader that runs no code could not give back; "
            "files hold tensors and plain values (numbers, texts, bytes, None, lists, tuples, dicts)"
        )

    def _assemble(self, lazy: LazyTensor) -> torch.Tensor:
        if lazy.nbytes <= _SMALL:
            # Read, even when it is a view of something larger: torch.save would write all of that.
            return lazy.read(0, lazy.numel).clone().view(lazy.shape)
        flat = self._memory(lazy)
        window = max(1, WINDOW_BYTES // flat.element_size())
        for start in range(0, lazy.numel, window):
            stop = min(start + window, lazy.numel)
            flat[start:stop].copy_(lazy.read(start, stop))
        return flat.view(lazy.shape)

    def _memory(self, lazy: LazyTensor) -> torch.Tensor:
        try:
            with tempfile.NamedTemporaryFile(dir=self._directory, prefix=".shardrt-") as file:
                os.posix_fallocate(file.fileno(), 0, lazy.nbytes)  # a full disk is an error here, and a crash later
                return torch.from_file(file.name, shared=True, size=lazy.numel, dtype=dtype_called(lazy.dtype))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{self._directory} has no room for {lazy.nbytes} bytes of work: {error}") from error

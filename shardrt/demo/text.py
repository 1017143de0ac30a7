"""Text that every machine has: the sources of Python's own standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch

from shardrt.errors import ConfigError

MOST_BYTES = 2 * 2**20
_LEFT_OUT = frozenset({"__pycache__", "dist-packages", "site-packages"})


@attrs.frozen(kw_only=True, eq=False)
class Corpus:
    """Bytes to learn from."""

    data: torch.Tensor
    files: int
    folder: str

    def windows(self, *, seed: int, step: int, rank: int, count: int, length: int) -> torch.Tensor:
        """A batch of ``count`` windows: the same for the same arguments, different for each step and rank.

        Example:
            >>> from shardrt.demo.text import read_corpus
            >>> corpus = read_corpus(most_bytes=10_000)
            >>> tuple(corpus.windows(seed=0, step=3, rank=1, count=2, length=9).shape)
            (2, 9)
        """
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 65_536 + rank)
        starts = torch.randint(self.data.numel() - length + 1, (count, 1), generator=generator)
        return self.data[starts + torch.arange(length)].long()


def read_corpus(folder: str | Path | None = None, *, most_bytes: int = MOST_BYTES, least_bytes: int = 4096) -> Corpus:
    """The ``.py`` files below a folder (the standard library), in the order of their names, up to ``most_bytes``.

    Example:
        >>> from shardrt.demo.text import read_corpus
        >>> read_corpus(most_bytes=10_000).data.numel()
        10000
    """
    root = Path(sysconfig.get_paths()["stdlib"] if folder is None else folder)
    text = bytearray()
    files = 0
    for path in _sources(root):
        try:
            text += path.read_bytes()
        except OSError:  # not ours to read: there is more
            continue
        files += 1
        if len(text) >= most_bytes:
            break
    if len(text) < least_bytes:
        raise ConfigError(
            f"the demo learns from Python's own sources, but {files} readable .py files with {len(text)} bytes are "
            f"below {str(root)!r} and it needs {least_bytes}; use a Python whose standard library is installed as files"
        )
    del text[most_bytes:]
    return Corpus(data=torch.frombuffer(text, dtype=torch.uint8), files=files, folder=str(root))


def _sources(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if name not in _LEFT_OUT)
        yield from (Path(folder) / name for name in sorted(names) if name.endswith(".py"))

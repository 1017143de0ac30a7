"""Which program a path is from."""

from __future__ import annotations

import zipfile
from pathlib import Path

from shardrt.errors import CheckpointError, NoCheckpointError
from shardrt.interchange.dcp_metadata import METADATA
from shardrt.interchange.hf import INDEX_SUFFIX, SUFFIX

KINDS = {
    "torch": "a file of torch.save with state dicts, or a directory with such: model.pt, optimizer.pt or both",
    "dcp": "a directory of torch.distributed.checkpoint, with .metadata",
    "hf": "a .safetensors file, or a directory with one or with several and their index",
}
"""What is understood, by the names that :func:`detect` gives."""
TORCH_FILES = ("model.pt", "optimizer.pt")
"""What ``shardrt ckpt export`` writes for torch."""


def detect(path: str | Path) -> str:
    """What a path holds: ``"torch"``, ``"dcp"`` or ``"hf"``; an error that lists these for anything else.

    Looks at names and first bytes only, and reads nothing into objects.

    Example:
        >>> import torch
        >>> from shardrt.interchange import detect
        >>> torch.save({"w": torch.ones(2)}, "model.pt")
        >>> detect("model.pt")
        'torch'
    """
    given = Path(path)
    if given.is_dir():
        kind = _directory(given)
    elif given.is_file():
        kind = _file(given)
    else:
        raise NoCheckpointError(f"{given} is neither a file nor a directory")
    if kind is None:
        understood = "; ".join(f"{name}: {what}" for name, what in KINDS.items())
        raise CheckpointError(f"{given} is nothing that can be imported. Understood are {understood}")
    return kind


def _directory(path: Path) -> str | None:
    if (path / METADATA).is_file() or list(path.glob(f"__*{METADATA}")):
        return "dcp"
    if list(path.glob(f"*{INDEX_SUFFIX}")) or list(path.glob(f"*{SUFFIX}")):
        return "hf"
    return "torch" if any((path / name).is_file() for name in TORCH_FILES) else None


def _file(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if start.startswith(b"PK\x03\x04"):
        try:
            with zipfile.ZipFile(path) as archive:
                return "torch" if any(name.endswith("/data.pkl") for name in archive.namelist()) else None
        except (zipfile.BadZipFile, ValueError, OSError):
            return "torch" if b"data.pkl" in _beginning(path) else None  # cut off: its reader says so
    if path.suffix == SUFFIX or start[8:] == b"{":
        return "hf"
    return "torch" if start[:1] == b"\x80" and start[1:2] <= b"\x05" else None  # a pickle, as torch wrote before 1.6


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(256)

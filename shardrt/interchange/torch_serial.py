"""The one place where torch's serialisation is called: reading admits weights only, writing admits tensors and values.

A test holds the rest of the project to never calling it, and this file to saying ``weights_only=True`` in every call.
"""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from shardrt.errors import CheckpointError

_ZIP = b"PK\x03\x04"


def load_weights(path: Path) -> Any:
    """What a file of ``torch.save`` holds, its tensors mapped into memory rather than read where the format allows.

    Example:
        >>> import pathlib, torch
        >>> from shardrt.interchange.torch_serial import load_weights, save_weights
        >>> save_weights({"w": torch.ones(2)}, pathlib.Path("w.pt"))
        >>> load_weights(pathlib.Path("w.pt"))
        {'w': tensor([1., 1.])}
    """
    try:
        with path.open("rb") as file:
            mapped = file.read(len(_ZIP)) == _ZIP
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is odd about a file is refused, or it is none of the user's business
            return torch.load(str(path), map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        raise refused(str(path), error) from error


def load_weights_from(data: bytes, *, where: str) -> Any:
    """The same from bytes, for small values.

    Example:
        >>> import io, torch
        >>> from shardrt.interchange.torch_serial import load_weights_from
        >>> stored = io.BytesIO()
        >>> torch.save({"betas": (0.9, 0.95)}, stored)
        >>> load_weights_from(stored.getvalue(), where="an item")
        {'betas': (0.9, 0.95)}
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise refused(where, error) from error


def save_weights(value: Any, path: Path) -> None:
    """Write with ``torch.save`` to a file that is there wholly or not at all."""
    unfinished = path.with_name(f".{path.name}.unfinished-{os.getpid()}")
    try:
        torch.save(value, str(unfinished))
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def refused(where: str, error: Exception) -> CheckpointError:
    """What torch's refusals become: the reason is kept, the advice to unpickle all the same is not."""
    told, advice, _ = str(error).partition("Check the documentation of torch.load")
    lines = [line.strip() for line in told.splitlines() if line.strip()] or [type(error).__name__]
    if not advice:
        return CheckpointError(f"{where} could not be read as a file of torch.save: {lines[0]}")
    reason = lines[-1].rpartition("WeightsUnpickler error:")[2].strip().partition(" was not an allowed")[0]
    return CheckpointError(
        f"{where} is not a file of tensors and plain values: torch's weights-only reader refused it ({reason}). "
        "It could run code when it is unpickled, so it is not; save state dicts instead of objects"
    )

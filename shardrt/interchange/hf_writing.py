"""Weights written as Hugging Face's libraries write them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from shardrt.errors import CheckpointError, StateError
from shardrt.interchange.backed import WINDOW_BYTES
from shardrt.interchange.hf import INDEX_SUFFIX, SUFFIX, WHOLE, safetensors_format
from shardrt.interchange.naming import few
from shardrt.interchange.torch_files import the_only
from shardrt.plan.params import ITEM_SIZES
from shardrt.protocols import StateFormat, TensorSpec
from shardrt.state.portable import LazyTensor, PortableState


def write_hf(
    state: PortableState,
    path: str | Path,
    *,
    max_shard_bytes: float = 5e9,
    format: StateFormat | None = None,
) -> None:
    """Write the model's weights into a directory: one safetensors file, or several of limited size and their index.

    A tensor that is larger than the limit gets a file of its own. Optimizers and ``extra`` have no place there. A
    directory that has weights already is refused; other files in it stay. See Note [Tied weights in safetensors].

    Example:
        >>> import tempfile, torch
        >>> from shardrt.interchange import write_hf
        >>> from shardrt.state.portable import LazyTensor, PortableState
        >>> state = PortableState(models={"model": {"w": LazyTensor.of(torch.ones(3))}}, optimizers={})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_hf(state, folder, max_shard_bytes=1e9)
    """
    if max_shard_bytes < 1:
        raise StateError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    format = safetensors_format() if format is None else format
    model: Mapping[str, LazyTensor] = the_only(state.models, "model")
    directory = Path(path)
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; name a directory")
    if present := sorted(each.name for each in directory.glob("*.safetensors*")):
        raise CheckpointError(f"{directory} has weights already: {few(present)}; name another directory")
    weights, ties = _once(model)
    shards = _shards(weights, max_shard_bytes)
    if len(shards) == 1:
        names = [WHOLE]
    else:
        names = [f"model-{at:05d}-of-{len(shards):05d}{SUFFIX}" for at in range(1, len(shards) + 1)]
    unfinished = {name: directory / f".{name}.unfinished-{os.getpid()}" for name in names}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, shard in zip(names, shards, strict=True):
            _write(unfinished[name], shard, ties, format)
        for name, file in unfinished.items():
            file.replace(directory / name)
        if len(shards) > 1:
            unfinished["index"] = directory / f".index.unfinished-{os.getpid()}"
            unfinished["index"].write_text(_index(names, shards), encoding="utf-8")
            unfinished["index"].replace(directory / f"model{INDEX_SUFFIX}")
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written: {error}") from error
    finally:
        for file in unfinished.values():
            file.unlink(missing_ok=True)


def _once(model: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    first: dict[int, str] = {}
    weights: dict[str, LazyTensor] = {}
    ties: dict[str, str] = {}
    for name, lazy in model.items():
        if id(lazy) in first:
            ties[name] = first[id(lazy)]
        else:
            first[id(lazy)] = name
            weights[name] = lazy
    return weights, ties


def _shards(weights: Mapping[str, LazyTensor], limit: float) -> list[dict[str, LazyTensor]]:
    shards: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, lazy in weights.items():
        if shards[-1] and size + lazy.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = lazy
        size += lazy.nbytes
    return shards


def _index(names: list[str], shards: list[dict[str, LazyTensor]]) -> str:
    total = sum(lazy.nbytes for shard in shards for lazy in shard.values())
    weight_map = {each: name for name, shard in zip(names, shards, strict=True) for each in shard}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


def _write(file: Path, shard: Mapping[str, LazyTensor], ties: Mapping[str, str], format: StateFormat) -> None:
    specs = {name: TensorSpec(dtype=lazy.dtype, shape=lazy.shape) for name, lazy in shard.items()}
    # "format" is what transformers looks for before it reads a file.
    metadata = {**{name: stored for name, stored in ties.items() if stored in shard}, "format": "pt"}
    layout = format.layout(specs, metadata)
    with file.open("wb") as out:
        out.write(layout.header)
        for name in layout.tensors:
            assert out.tell() == layout.offsets[name], "a layout has no gaps"
            lazy = shard[name]
            window = max(1, WINDOW_BYTES // ITEM_SIZES[lazy.dtype])
            for start in range(0, lazy.numel, window):
                piece = lazy.read(start, min(start + window, lazy.numel)).contiguous()
                out.write(memoryview(piece.view(torch.uint8).numpy()))  # type: ignore[arg-type]
        out.flush()
        os.fsync(out.fileno())

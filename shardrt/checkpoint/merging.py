"""From what all ranks say of their files to the manifest of the whole."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from shardrt.checkpoint.manifest import (
    Manifest,
    Piece,
    Spread,
    StoredFile,
    StoredModel,
    StoredOptimizer,
    StoredParam,
)
from shardrt.errors import StateError
from shardrt.protocols import TensorSpec


def merge(
    *,
    id: str,
    step: int,
    files: Sequence[StoredFile],
    pieces: Sequence[Mapping[str, Any]],
    random: Sequence[Any],
    common: Mapping[str, Any],
    state_format: str,
    block_bytes: int,
    software: Mapping[str, Any],
    runtime: Mapping[str, Any],
) -> Manifest:
    """The manifest; ``pieces`` and ``random`` are in the order of the files."""
    return Manifest(
        id=id,
        step=step,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        world_size=len(files),
        state_format=state_format,
        block_bytes=block_bytes,
        files=tuple(files),
        models={
            name: _model(about, [rank["models"][name] for rank in pieces]) for name, about in common["models"].items()
        },
        optimizers={
            name: _optimizer(about, [rank["optimizers"][name]["state"] for rank in pieces])
            for name, about in common["optimizers"].items()
        },
        extra=common["extra"],
        random=tuple(random),
        software=software,
        runtime=runtime,
    )


def _model(about: Mapping[str, Any], ranks: Sequence[Mapping[str, Sequence[Sequence[Any]]]]) -> StoredModel:
    # By what ranks have, and not by asking each rank for each tensor: most have nothing of most tensors.
    found: dict[str, list[Piece]] = {}
    for file, rank in enumerate(ranks):
        for name, rows in rank.items():
            found.setdefault(name, []).extend(Piece(file, *row) for row in rows)
    tensors = {
        name: _spread(TensorSpec(dtype=dtype, shape=tuple(shape)), found.get(name, []), f"model tensor {name!r}")
        for name, (dtype, shape) in about["tensors"].items()
    }
    return StoredModel(
        tensors=tensors,
        buffers=frozenset(about["buffers"]),
        aliases=about["aliases"],
        values=about["values"],
    )


def _optimizer(about: Mapping[str, Any], ranks: Sequence[Sequence[Any]]) -> StoredOptimizer:
    sliced: dict[str, dict[str, list[Piece]]] = {name: {} for name in about["params"]}
    dtypes: dict[tuple[str, str], str] = {}
    trees: dict[str, dict[str, tuple[int, Any]]] = {name: {} for name in about["params"]}
    for file, rows in enumerate(ranks):
        for param, start, stop, tensors, values in rows:
            for key, (stored, dtype) in tensors.items():
                sliced[param].setdefault(key, []).append(Piece(file, stored, start, stop))
                if dtypes.setdefault((param, key), dtype) != dtype:
                    raise StateError(
                        f"rank {file} keeps {key!r} of {param!r} in {dtype}, and another rank in {dtypes[param, key]}"
                    )
            trees[param].update({key: (file, tree) for key, tree in values.items()})
    params = {}
    for name, (dtype, shape) in about["params"].items():
        spreads = {
            key: _spread(
                TensorSpec(dtype=dtypes[name, key], shape=tuple(shape)), found, f"optimizer state {key!r} of {name!r}"
            )
            for key, found in sliced[name].items()
        }
        params[name] = StoredParam(shape=tuple(shape), dtype=dtype, sliced=spreads, trees=trees[name])
    return StoredOptimizer(
        kind=about["class"],
        step=about["step"],
        groups=tuple((options, tuple(names)) for options, names in about["groups"]),
        params=params,
        plan=about["plan"],
    )


def _spread(spec: TensorSpec, pieces: list[Piece], what: str) -> Spread:
    ordered = sorted(pieces, key=lambda piece: (piece.start, piece.stop))
    expected = 0
    for piece in ordered:
        if piece.start != expected:
            raise StateError(
                f"{what} would be stored with {'an overlap' if piece.start < expected else 'a gap'} at element "
                f"{expected}: its shards were not stepped alike on all ranks"
            )
        expected = piece.stop
    return Spread(spec=spec, pieces=tuple(ordered))

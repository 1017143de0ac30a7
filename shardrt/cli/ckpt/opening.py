"""From a path on the command line to a checkpoint that can be read, and to a place that one is written to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import shardrt
from shardrt.checkpoint.opened import OpenCheckpoint, find_directory, open_checkpoint
from shardrt.checkpoint.series import MANIFEST, Series
from shardrt.choosing import choose_place
from shardrt.cli.ckpt.telling import counted
from shardrt.errors import NoCheckpointError
from shardrt.protocols import Place
from shardrt.registry import Registry


def open_path(path: str, step: int | None, registry: Registry) -> OpenCheckpoint:
    """The checkpoint that is meant: that of the path itself, or the latest below it, or that of a step.

    Example:
        >>> import shardrt, torch
        >>> from shardrt.cli.ckpt.opening import open_path
        >>> with shardrt.Runtime() as rt:
        ...     _ = rt.save("run", model=torch.nn.Linear(2, 1))
        >>> open_path("run", None, shardrt.load_registry()).manifest.world_size
        1
    """
    place = choose_place(registry)(path)
    return open_checkpoint(place, registry, directory_in(place, step))


def directory_in(place: Place, step: int | None) -> str:
    """The directory of the checkpoint that is meant, below the place's root."""
    if MANIFEST not in place.list() and not Series(place).committed():
        there = place.list()
        shown = ", ".join(there[:5]) + (f" and {len(there) - 5} more" if len(there) > 5 else "") if there else "nothing"
        raise NoCheckpointError(
            f"there is no complete checkpoint in {place.root!r}; it has {shown}; give what was given to rt.save, or "
            "the directory of one checkpoint"
        )
    return find_directory(place, step)


def random_notes(checkpoint: OpenCheckpoint, ranks: int) -> tuple[list[Any], list[str]]:
    """The random states for so many ranks, or none and a note that says so."""
    trees = checkpoint.manifest.random
    if len(trees) == ranks:
        return [checkpoint.tree(tree, rank, what="random states") for rank, tree in enumerate(trees)], []
    if not trees:
        return [], []
    return [], [
        f"random states of {counted(len(trees), 'rank')} were left out: they do not fit {counted(ranks, 'rank')}, and "
        "whoever loads this keeps their own"
    ]


def software(registry: Registry) -> dict[str, Any]:
    """What a manifest says of the programs that wrote it."""
    import torch

    return {"shardrt": shardrt.__version__, "torch": str(torch.__version__), "plugins": registry.versions()}


def made_by(command: str, partitioner: str, state_format: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest says of the run that it is of, where there was none."""
    return {
        "offline": command,
        "source": dict(source),
        "partitioner": {"name": partitioner},
        "state_format": {"name": state_format},
    }


def told_source(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """Which checkpoint another was made from."""
    manifest = checkpoint.manifest
    runtime = {key: value for key, value in manifest.runtime.items() if key != "source"}
    return {"id": manifest.id, "world_size": manifest.world_size, "runtime": runtime}

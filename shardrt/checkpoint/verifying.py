"""Every byte of a checkpoint against the checksums it was written with; what is wrong is noted, and the rest read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs

from shardrt.checkpoint.manifest import Manifest
from shardrt.checkpoint.opened import OpenCheckpoint
from shardrt.errors import CheckpointError
from shardrt.state.tree import tensor_names

Advance = Callable[[int], None]


@attrs.frozen(kw_only=True)
class Problem:
    """One thing that is not as it was written."""

    file: str | None
    """Its name in the checkpoint's directory; None for what concerns the directory."""
    tensor: str | None
    """None for what concerns the whole file."""
    error: str

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return attrs.asdict(self)


def verify_checkpoint(checkpoint: OpenCheckpoint, advance: Advance) -> Iterator[Problem]:
    """Look at all of an open checkpoint, in the order of its files; ``advance`` is told of every tensor's bytes."""
    try:
        checkpoint.check_directory()
    except CheckpointError as error:
        yield Problem(file=None, tensor=None, error=str(error))
    for number in range(len(checkpoint.manifest.files)):
        yield from _file(checkpoint, number, advance)
    yield from _values(checkpoint)


def _file(checkpoint: OpenCheckpoint, number: int, advance: Advance) -> Iterator[Problem]:
    files, file = checkpoint.files, checkpoint.manifest.files[number]
    try:
        files.check(number)
    except CheckpointError as error:
        yield Problem(file=file.name, tensor=None, error=str(error))
        if not files.is_there(number):
            advance(sum(one.spec.nbytes for one in file.tensors.values()))
            return
        files.go_on_with(number)
    for name, tensor in file.tensors.items():
        done = 0

        def note(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            advance(nbytes)

        try:
            files.verify(number, name, note)
        except CheckpointError as error:
            yield Problem(file=file.name, tensor=name, error=str(error))
            advance(tensor.spec.nbytes - done)


def _values(checkpoint: OpenCheckpoint) -> Iterator[Problem]:
    """Values name the tensors in them; those must be in the file that is said to have them."""
    for what, number, tree in _trees(checkpoint.manifest):
        if number >= len(checkpoint.manifest.files):
            yield Problem(file=None, tensor=None, error=f"{what} are of a rank that has no file")
            continue
        file = checkpoint.manifest.files[number]
        for name in tensor_names(tree):
            if name not in file.tensors:
                error = f"{what} refers to tensor {name!r}, which file {file.name!r} does not have"
                yield Problem(file=file.name, tensor=name, error=error)


def _trees(manifest: Manifest) -> Iterator[tuple[str, int, Any]]:
    yield "extra", 0, manifest.extra
    for rank, tree in enumerate(manifest.random):
        yield f"random states of rank {rank}", rank, tree
    for name, model in manifest.models.items():
        yield f"extra state of model {name!r}", 0, model.values
    for name, one in manifest.optimizers.items():
        for number, (options, _) in enumerate(one.groups):
            yield f"options of group {number} of {name!r}", 0, options
        for param, stored in one.params.items():
            for key, (file, tree) in stored.trees.items():
                yield f"{key!r} of {param!r} in {name!r}", file, tree

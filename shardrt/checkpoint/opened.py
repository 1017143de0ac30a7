"""A checkpoint that was found: its manifest read and checked, its files at hand."""

from __future__ import annotations

from typing import Any

import attrs

from shardrt.checkpoint.manifest import Manifest, StoredOptimizer
from shardrt.checkpoint.reading import CheckedFiles
from shardrt.checkpoint.series import MANIFEST, Series
from shardrt.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError, ShardrtError
from shardrt.protocols import Place
from shardrt.registry import Registry
from shardrt.state.portable import PortableOptimizer, PortableState
from shardrt.state.tree import unpack

_OURS = ("writing.json",)
_MOST_MANIFEST_BYTES = 2**30
"""Millions of tensors fit in. What is larger is not read at all."""


@attrs.frozen(kw_only=True, eq=False)
class OpenCheckpoint:
    """What :func:`open_checkpoint` returns."""

    files: CheckedFiles
    directory: str
    """Under the place's root; empty where the root is the checkpoint itself."""

    @property
    def manifest(self) -> Manifest:
        """What it says of itself."""
        return self.files.manifest

    @property
    def where(self) -> str:
        """For messages."""
        root = self.files.place.root
        return f"{root}/{self.directory}" if self.directory else root

    def tree(self, tree: Any, file: int, *, what: str) -> Any:
        """A stored value, with the tensors in it."""
        return unpack(tree, lambda name: self.files.whole(file, name), where=f"{what} in {self.where!r}")

    def mapping(self, tree: Any, file: int, *, what: str) -> dict[str, Any]:
        """A stored value that must be a mapping by text."""
        value = self.tree(tree, file, what=what)
        if type(value) is not dict or not all(type(key) is str for key in value):
            raise CheckpointError(f"{what} in {self.where!r} must be a mapping of names, it is {str(value)[:60]}")
        return value

    def check_directory(self) -> None:
        """Nothing else may be there: a stray file of another save is a sign that two were mixed."""
        known = {file.name for file in self.manifest.files} | {MANIFEST, *_OURS}
        found = self.files.place.list(self.directory)
        strays = [name for name in found if name not in known and not name.startswith(".")]
        if strays:
            raise CheckpointError(
                f"{self.where!r} has {strays[0]!r}, which its manifest does not know; move it away if it does not "
                "belong there, or load another checkpoint if files of two were mixed"
            )

    def portable(self) -> PortableState:
        """Everything in it, read when it is wanted."""
        manifest = self.manifest
        return PortableState(
            models={
                name: {
                    **{key: self.files.lazy(spread) for key, spread in model.tensors.items()},
                    **{alias: self.files.lazy(model.tensors[key]) for alias, key in model.aliases.items()},
                }
                for name, model in manifest.models.items()
            },
            optimizers={name: self._portable_optimizer(one) for name, one in manifest.optimizers.items()},
            extra=self.tree(manifest.extra, 0, what="extra"),
        )

    def _portable_optimizer(self, one: StoredOptimizer) -> PortableOptimizer:
        groups = tuple(
            {**self.mapping(options, 0, what="group options"), "params": list(params)} for options, params in one.groups
        )
        state: dict[str, dict[str, Any]] = {}
        for name, param in one.params.items():
            values: dict[str, Any] = {
                key: self.tree(tree, file, what=f"optimizer state {key!r} of {name!r}")
                for key, (file, tree) in param.trees.items()
            }
            values |= {key: self.files.lazy(spread) for key, spread in param.sliced.items()}
            if values:
                state[name] = values
        return PortableOptimizer(groups=groups, state=state, kind=one.kind, step=one.step)

    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.spec.nbytes for file in self.manifest.files for tensor in file.tensors.values())


def find_directory(place: Place, step: int | None) -> str:
    """The directory of the checkpoint that is meant: the root itself, the latest below it, or that of a step."""
    if MANIFEST in place.list():
        if step is not None:
            raise CheckpointError(
                f"{place.root!r} is one checkpoint, and step={step} chooses among several; pass their directory"
            )
        return ""
    series = Series(place)
    return str(series.latest() if step is None else series.at_step(step))


def open_checkpoint(place: Place, registry: Registry, directory: str) -> OpenCheckpoint:
    """Read the manifest of a checkpoint and check it; errors say which earlier ones there are."""
    path = f"{directory}/{MANIFEST}" if directory else MANIFEST
    try:
        size = place.size(path)
        if size > _MOST_MANIFEST_BYTES:
            raise DamagedCheckpointError(
                f"manifest {path!r} of {place.root!r} has {size} bytes, and {_MOST_MANIFEST_BYTES} is the most that "
                "one may have"
            )
        data = place.read(path)
    except FileNotFoundError:
        raise NoCheckpointError(f"{place.root!r} has no {path!r}; there is no complete checkpoint") from None
    try:
        manifest = Manifest.from_bytes(data, where=f"manifest {path!r} of {place.root!r}")
        state_format = registry.state_formats.get(manifest.state_format).factory()
    except ShardrtError as error:
        others = [str(name) for name in Series(place).committed() if str(name) != directory] if directory else []
        if isinstance(error, CheckpointError):
            raise type(error)(f"{error}{_instead(others)}") from error
        raise CheckpointError(f"manifest {path!r} of {place.root!r}: {error}{_instead(others)}") from error
    return OpenCheckpoint(files=CheckedFiles(place, directory, manifest, state_format), directory=directory)


def _instead(others: list[str]) -> str:
    return f"; other checkpoints there: {', '.join(others[-5:])}" if others else ""


def instead_of(checkpoint: OpenCheckpoint, error: DamagedCheckpointError) -> DamagedCheckpointError:
    """The error of a damaged checkpoint, with those that could be loaded in its place."""
    if not checkpoint.directory:
        return error
    names = Series(checkpoint.files.place).committed()
    return DamagedCheckpointError(f"{error}{_instead([str(n) for n in names if str(n) != checkpoint.directory])}")

"""A checkpoint that was found: its manifest read and checked, its files at hand."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from shardrt.checkpoint.manifest import Manifest, Piece, Spread, StoredOptimizer
from shardrt.checkpoint.reading import CheckedFiles
from shardrt.checkpoint.series import MANIFEST, Series
from shardrt.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError, ShardrtError
from shardrt.plan import ITEM_SIZES, ParamSpec
from shardrt.protocols import Place, StateFormat
from shardrt.registry import Registry
from shardrt.state.optimizers import plain_name
from shardrt.state.portable import LazyTensor, PortableOptimizer, PortableState
from shardrt.state.tree import unpack

_OURS = ("writing.json",)
_SMALL_BYTES = 64 * 2**10
"""Tensors inside values (a count of steps) are read at once up to this size."""
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
    def state_format(self) -> StateFormat:
        """How its files are laid out."""
        return self.files.state_format

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
        return self._as_mapping(self.tree(tree, file, what=what), what)

    def _as_mapping(self, value: Any, what: str) -> dict[str, Any]:
        if type(value) is not dict or not all(type(key) is str for key in value):
            raise CheckpointError(f"{what} in {self.where!r} must be a mapping of names, it is {str(value)[:60]}")
        return value

    def lazy_tree(self, tree: Any, file: int, *, what: str) -> Any:
        """A stored value in which large tensors are read when they are wanted."""
        return unpack(tree, lambda name: self._small_or_lazy(file, name), where=what)

    def _small_or_lazy(self, file: int, name: str) -> torch.Tensor | LazyTensor:
        found = self.files.check(file).tensors.get(name)
        if found is None or found.spec.nbytes <= _SMALL_BYTES:
            return self.files.whole(file, name)
        numel = found.spec.nbytes // ITEM_SIZES[found.spec.dtype]
        return self.files.lazy(Spread(spec=found.spec, pieces=(Piece(file, name, 0, numel),)))

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
        """Everything in it but the random states, read when it is wanted."""
        manifest = self.manifest
        models: dict[str, dict[str, LazyTensor]] = {}
        for name, model in manifest.models.items():
            tensors = {key: self.files.lazy(spread) for key, spread in model.tensors.items()}
            models[name] = {**tensors, **{alias: tensors[key] for alias, key in model.aliases.items()}}
        return PortableState(
            models=models,
            optimizers={name: self._portable_optimizer(one) for name, one in manifest.optimizers.items()},
            extra=self.lazy_tree(manifest.extra, 0, what="extra"),
            buffers={name: model.buffers for name, model in manifest.models.items()},
            values={
                name: self.lazy_tree(model.values, 0, what=f"extra state of {name!r}")
                for name, model in manifest.models.items()
            },
        )

    def _portable_optimizer(self, one: StoredOptimizer) -> PortableOptimizer:
        groups = tuple(
            {
                **self._as_mapping(self.lazy_tree(options, 0, what="group options"), "group options"),
                "params": list(params),
            }
            for options, params in one.groups
        )
        state: dict[str, dict[str, Any]] = {}
        for name, param in one.params.items():
            values: dict[str, Any] = {
                key: self.lazy_tree(tree, file, what=f"optimizer state {key!r} of {name!r}")
                for key, (file, tree) in param.trees.items()
            }
            values |= {key: self.files.lazy(spread) for key, spread in param.sliced.items()}
            if values:
                state[name] = values
        return PortableOptimizer(groups=groups, state=state, kind=one.kind, step=one.step, params=_params(one))

    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.spec.nbytes for file in self.manifest.files for tensor in file.tensors.values())


def _params(one: StoredOptimizer) -> dict[str, ParamSpec]:
    """The parameters as planning sees them; the plan of whoever saved them knows which were trained."""
    planned = one.plan.get("params", ()) if isinstance(one.plan, dict) else ()
    frozen = {
        plain_name(str(row.get("name"))) for row in planned if isinstance(row, dict) and row.get("trainable") is False
    }
    group = {name: number for number, (_, params) in enumerate(one.groups) for name in params}
    return {
        name: ParamSpec(
            name=name,
            shape=param.shape,
            dtype=param.dtype,
            trainable=plain_name(name) not in frozen,
            group=group.get(name, 0),
        )
        for name, param in one.params.items()
    }


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

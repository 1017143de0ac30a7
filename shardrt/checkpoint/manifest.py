"""What a checkpoint says of itself: a JSON file, checked to the last bit on the way in.

Note [Sealed]: the file ends in the checksum of all its bytes before that, in a fixed form, and is JSON all the same.
A flipped bit anywhere, spaces included, or a cut end is found before anything in it is believed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import attrs

from shardrt.checkpoint.blocks import DIGITS, block_count, checksum
from shardrt.errors import CheckpointError, DamagedCheckpointError, PlanError
from shardrt.plan import ITEM_SIZES
from shardrt.plan.reading import is_count, read_count, read_field, read_list, read_text
from shardrt.protocols import TensorSpec

FORMAT = "shardrt-checkpoint"
VERSION = 1
_SEAL = re.compile(rb'"checksum": "([0-9a-f]{%d})"}\n\Z' % DIGITS)
_SEAL_BYTES = len('"checksum": ""}\n') + DIGITS
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\Z")
_LARGEST = 2**62


@attrs.frozen
class Piece:
    """Elements ``[start, stop)`` of a tensor, stored as a tensor of their own in one of the files."""

    file: int
    name: str
    start: int
    stop: int


@attrs.frozen(kw_only=True)
class StoredTensor:
    """A tensor in a file: where its bytes begin, and the checksum of each block of them."""

    spec: TensorSpec
    offset: int
    blocks: tuple[str, ...]


@attrs.frozen(kw_only=True)
class StoredFile:
    """One rank's file."""

    name: str
    size: int
    header: str
    """The checksum of everything before the first tensor."""
    header_bytes: int
    tensors: Mapping[str, StoredTensor]


@attrs.frozen(kw_only=True)
class Spread:
    """A whole tensor, stored in pieces that cover each element once."""

    spec: TensorSpec
    pieces: tuple[Piece, ...]


@attrs.frozen(kw_only=True)
class StoredModel:
    """A model's tensors, further names of tied ones, and what it keeps beside tensors (a tree in the first file)."""

    tensors: Mapping[str, Spread]
    buffers: frozenset[str]
    aliases: Mapping[str, str]
    values: Any


@attrs.frozen(kw_only=True)
class StoredParam:
    """What an optimizer keeps for one parameter: see Note [Slices and trees] in :mod:`shardrt.state.optimizers`."""

    shape: tuple[int, ...]
    dtype: str
    sliced: Mapping[str, Spread]
    trees: Mapping[str, tuple[int, Any]]
    """By key: the file that the tree's tensors are in, and the tree."""


@attrs.frozen(kw_only=True)
class StoredOptimizer:
    """An optimizer: its class, how many updates it made, its groups and its state."""

    kind: str
    step: int
    groups: tuple[tuple[Any, tuple[str, ...]], ...]
    """For each group its options (a tree in the first file) and the names of its parameters."""
    params: Mapping[str, StoredParam]
    plan: Any = None
    """The plan of the ranks that saved it, as JSON."""


@attrs.frozen(kw_only=True)
class Manifest:
    """Everything but the tensors' bytes."""

    id: str
    """Tells two saves apart: each file carries it."""
    step: int
    created: str
    world_size: int
    state_format: str
    block_bytes: int
    files: tuple[StoredFile, ...]
    models: Mapping[str, StoredModel]
    optimizers: Mapping[str, StoredOptimizer]
    extra: Any = None
    """What the trainer saved beside them (a tree in the first file)."""
    random: tuple[Any, ...] = ()
    """Each rank's random states (a tree in that rank's file)."""
    software: Mapping[str, Any] = attrs.field(factory=dict)
    runtime: Mapping[str, Any] = attrs.field(factory=dict)

    def to_bytes(self) -> bytes:
        """The sealed file."""
        return seal({"format": FORMAT, "version": VERSION, **_to_json(self)})

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> Manifest:
        """The inverse; whatever does not fit together is refused, naming what."""
        document = unseal(data, where=where)
        try:
            if document.get("format") != FORMAT:
                raise CheckpointError(f"{where} is of format {str(document.get('format'))[:60]!r}, not {FORMAT!r}")
            if document.get("version") != VERSION:
                raise CheckpointError(
                    f"{where} has version {str(document.get('version'))[:60]} of the format; this shardrt reads "
                    f"version {VERSION}: use the shardrt that wrote it, or a newer one"
                )
            return _from_json(document)
        except PlanError as error:
            raise CheckpointError(f"{where} does not fit together: {error}") from None
        except RecursionError:
            raise CheckpointError(f"{where} is nested deeper than any manifest") from None


def seal(document: Mapping[str, Any]) -> bytes:
    """A JSON object as the bytes of a file that ends in their checksum.

    Example:
        >>> from shardrt.checkpoint.manifest import seal, unseal
        >>> unseal(seal({"a": 1}), where="here")
        {'a': 1}
    """
    body = json.dumps(document, separators=(",", ":"), allow_nan=False)[:-1].encode() + b",\n"
    return body + f'"checksum": "{checksum(body)}"}}\n'.encode()


def unseal(data: bytes, *, where: str) -> dict[str, Any]:
    """The object in a sealed file; raises :class:`~shardrt.errors.DamagedCheckpointError` at any difference."""
    found = _SEAL.search(data, max(len(data) - _SEAL_BYTES, 0))
    if found is None:
        raise DamagedCheckpointError(
            f"{where} is damaged: it does not end as a file of shardrt does ({len(data)} bytes)"
        )
    body = data[: found.start()]
    if checksum(body) != found[1].decode():
        raise DamagedCheckpointError(
            f"{where} is damaged: its bytes have the checksum {checksum(body)}, and it says {found[1].decode()}"
        )
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{where} holds a {type(document).__name__} instead of an object")
    document.pop("checksum", None)
    return document


def _to_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "id": manifest.id,
        "step": manifest.step,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "state_format": manifest.state_format,
        "block_bytes": manifest.block_bytes,
        "software": manifest.software,
        "runtime": manifest.runtime,
        "extra": manifest.extra,
        "random": list(manifest.random),
        "models": {name: _model_json(model) for name, model in manifest.models.items()},
        "optimizers": {name: _optimizer_json(one) for name, one in manifest.optimizers.items()},
        "files": [file_json(file) for file in manifest.files],
    }


def file_json(file: StoredFile) -> dict[str, Any]:
    """What a rank tells of the file it wrote, as it stands in the manifest."""
    return {
        "name": file.name,
        "size": file.size,
        "header": file.header,
        "header_bytes": file.header_bytes,
        "tensors": {
            name: [tensor.spec.dtype, list(tensor.spec.shape), tensor.offset, "".join(tensor.blocks)]
            for name, tensor in file.tensors.items()
        },
    }


def _spread_json(spread: Spread) -> list[Any]:
    pieces = [[piece.file, piece.name, piece.start, piece.stop] for piece in spread.pieces]
    return [spread.spec.dtype, list(spread.spec.shape), pieces]


def _model_json(model: StoredModel) -> dict[str, Any]:
    return {
        "tensors": {name: _spread_json(spread) for name, spread in model.tensors.items()},
        "buffers": sorted(model.buffers),
        "aliases": dict(model.aliases),
        "values": model.values,
    }


def _optimizer_json(one: StoredOptimizer) -> dict[str, Any]:
    return {
        "class": one.kind,
        "step": one.step,
        "groups": [[options, list(params)] for options, params in one.groups],
        "params": {
            name: {
                "shape": list(param.shape),
                "dtype": param.dtype,
                "sliced": {key: _spread_json(spread) for key, spread in param.sliced.items()},
                "trees": {key: list(tree) for key, tree in param.trees.items()},
            }
            for name, param in one.params.items()
        },
        "plan": one.plan,
    }


def _from_json(document: Mapping[str, Any]) -> Manifest:
    where = "manifest"
    block_bytes = read_count(document, "block_bytes", where=where, least=1)
    world_size = read_count(document, "world_size", where=where, least=1)
    files = tuple(file_from_json(item, block_bytes) for item in read_list(document, "files", where=where))
    if len({file.name for file in files}) != len(files):
        raise PlanError("two of its files have one name")
    if len(files) != world_size:
        raise PlanError(f"it is of {world_size} ranks and has {len(files)} files, where each rank has one")
    random = tuple(read_list(document, "random", where=where))
    if len(random) not in (0, len(files)):
        raise PlanError(f"it has random states of {len(random)} ranks and files of {len(files)}")
    models = {str(k): _model(v, files) for k, v in _mapping(document, "models", where).items()}
    optimizers = {str(k): _optimizer(v, files) for k, v in _mapping(document, "optimizers", where).items()}
    return Manifest(
        id=read_text(document, "id", where=where),
        step=read_count(document, "step", where=where),
        created=read_text(document, "created", where=where),
        world_size=world_size,
        state_format=read_text(document, "state_format", where=where),
        block_bytes=block_bytes,
        files=files,
        models=models,
        optimizers=optimizers,
        extra=read_field(document, "extra", where=where),
        random=random,
        software=_mapping(document, "software", where),
        runtime=_mapping(document, "runtime", where),
    )


def _mapping(data: object, key: str, where: str) -> dict[str, Any]:
    value = read_field(data, key, where=where)
    if not isinstance(value, dict):
        raise PlanError(f"{key!r} of {where} must be a mapping, got a {type(value).__name__}")
    return value


def _spec(dtype: object, shape: object, where: str) -> TensorSpec:
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise PlanError(f"{where} has dtype {dtype!r}; known dtypes: {', '.join(ITEM_SIZES)}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)) or len(shape) > 64:
        raise PlanError(f"{where} has shape {str(shape)[:60]}, which is not a list of sizes")
    # Sizes of 0 aside: (2**62, 2**62, 0) has no bytes, and yet strides that nobody can compute.
    if math.prod(filter(None, shape)) * ITEM_SIZES[dtype] > _LARGEST:
        raise PlanError(f"{where} has shape {str(shape)[:60]}, which is larger than any file")
    return TensorSpec(dtype=dtype, shape=tuple(shape))


def _is_size(value: object) -> bool:
    return is_count(value) and value <= _LARGEST  # type: ignore[operator]


def file_from_json(data: object, block_bytes: int) -> StoredFile:
    """The inverse of :func:`file_json`."""
    name = read_text(data, "name", where="file")
    if not _FILE_NAME.match(name):
        raise PlanError(f"a file is called {name!r}, which is not a plain name inside the checkpoint's directory")
    where = f"file {name!r}"
    size = read_count(data, "size", where=where)
    header_bytes = read_count(data, "header_bytes", where=where)
    tensors: dict[str, StoredTensor] = {}
    end = header_bytes
    for tensor, row in _mapping(data, "tensors", where).items():
        if not isinstance(row, list) or len(row) != 4:
            raise PlanError(
                f"tensor {tensor!r} of {where} must be [dtype, shape, offset, checksums], got {str(row)[:60]}"
            )
        dtype, shape, offset, sums = row
        spec = _spec(dtype, shape, f"tensor {tensor!r} of {where}")
        if not is_count(offset) or offset < end or offset + spec.nbytes > size:
            raise PlanError(
                f"tensor {tensor!r} of {where} claims {spec.nbytes} bytes from {str(offset)[:30]} on, where {end} to "
                f"{size} are free: ranges overlap or leave the file"
            )
        end = offset + spec.nbytes
        if not isinstance(sums, str) or len(sums) != DIGITS * block_count(spec.nbytes, block_bytes):
            raise PlanError(f"tensor {tensor!r} of {where} has no checksum for each of its blocks")
        cut = tuple(sums[at : at + DIGITS] for at in range(0, len(sums), DIGITS))
        tensors[tensor] = StoredTensor(spec=spec, offset=offset, blocks=cut)
    if end != size:
        raise PlanError(f"{where} claims {size} bytes, and its tensors end at {end}")
    header = read_text(data, "header", where=where)
    return StoredFile(name=name, size=size, header=header, header_bytes=header_bytes, tensors=tensors)


def _spread(row: object, files: tuple[StoredFile, ...], where: str) -> Spread:
    if not isinstance(row, list) or len(row) != 3 or not isinstance(row[2], list):
        raise PlanError(f"{where} must be [dtype, shape, pieces], got {str(row)[:60]}")
    spec = _spec(row[0], row[1], where)
    expected, pieces = 0, []
    for item in row[2]:
        if not isinstance(item, list) or len(item) != 4 or not isinstance(item[1], str):
            raise PlanError(f"a piece of {where} must be [file, name, start, stop], got {str(item)[:60]}")
        file, name, start, stop = item
        if not (is_count(file) and is_count(start) and is_count(stop)) or file >= len(files):
            raise PlanError(f"a piece of {where} has the numbers {[file, start, stop]}; there are {len(files)} files")
        stored = files[file].tensors.get(name)
        if stored is None:
            raise PlanError(f"a piece of {where} is tensor {name!r}, which file {files[file].name!r} does not have")
        if stored.spec.dtype != spec.dtype or stored.spec.nbytes != (stop - start) * ITEM_SIZES[spec.dtype]:
            raise PlanError(
                f"tensor {name!r} of file {files[file].name!r} is not elements {start} to {stop} of {where}"
            )
        if start != expected:
            raise PlanError(
                f"pieces of {where} {'overlap' if start < expected else 'leave a gap'} at element {expected}"
            )
        expected = stop
        pieces.append(Piece(file, name, start, stop))
    if expected * ITEM_SIZES[spec.dtype] != spec.nbytes:
        raise PlanError(f"pieces of {where} end at element {expected}; its shape is {list(spec.shape)}")
    return Spread(spec=spec, pieces=tuple(pieces))


def _model(data: object, files: tuple[StoredFile, ...]) -> StoredModel:
    tensors = {n: _spread(row, files, f"model tensor {n!r}") for n, row in _mapping(data, "tensors", "model").items()}
    aliases = _mapping(data, "aliases", "model")
    for alias, name in aliases.items():
        if not isinstance(name, str) or name not in tensors:
            raise PlanError(f"{alias!r} is another name of {name!r}, which the model does not have")
    buffers = frozenset(map(str, read_list(data, "buffers", where="model")))
    values = read_field(data, "values", where="model")
    return StoredModel(tensors=tensors, buffers=buffers, aliases=aliases, values=values)


def _optimizer(data: object, files: tuple[StoredFile, ...]) -> StoredOptimizer:
    params: dict[str, StoredParam] = {}
    for name, entry in _mapping(data, "params", "optimizer").items():
        where = f"optimizer state of {name!r}"
        whole = _spec(read_text(entry, "dtype", where=where), read_list(entry, "shape", where=where), where)
        sliced = {k: _spread(row, files, f"{where}, {k!r}") for k, row in _mapping(entry, "sliced", where).items()}
        for key, spread in sliced.items():
            if spread.spec.shape != whole.shape:
                raise PlanError(f"{where}, {key!r} has shape {spread.spec.shape}, the parameter {whole.shape}")
        trees: dict[str, tuple[int, Any]] = {}
        for key, row in _mapping(entry, "trees", where).items():
            if not isinstance(row, list) or len(row) != 2 or not is_count(row[0]) or row[0] >= len(files):
                raise PlanError(f"{where}, {key!r} must be [file, tree], got {str(row)[:60]}")
            trees[key] = (row[0], row[1])
        params[name] = StoredParam(shape=whole.shape, dtype=whole.dtype, sliced=sliced, trees=trees)
    groups = []
    for row in read_list(data, "groups", where="optimizer"):
        if not isinstance(row, list) or len(row) != 2 or not isinstance(row[1], list):
            raise PlanError(f"a group of the optimizer must be [options, parameters], got {str(row)[:60]}")
        groups.append((row[0], tuple(map(str, row[1]))))
    return StoredOptimizer(
        kind=read_text(data, "class", where="optimizer"),
        step=read_count(data, "step", where="optimizer"),
        groups=tuple(groups),
        params=params,
        plan=read_field(data, "plan", where="optimizer"),
    )

"""Writing a checkpoint for any number of ranks from one process, with memory for a block of it.

What ranks would each write is laid out first, as tensors that are read when they are wanted; then one file after the
other is written, block by block, and committed as a save by ranks is: see Note [Commit] in
:mod:`shardrt.checkpoint.series`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs

from shardrt.checkpoint.blocks import BLOCK_BYTES
from shardrt.checkpoint.manifest import StoredFile
from shardrt.checkpoint.merging import merge
from shardrt.checkpoint.parts import TensorTable, file_name, label_of
from shardrt.checkpoint.progress import progress_bar
from shardrt.checkpoint.series import MANIFEST, Series
from shardrt.checkpoint.spreading import SpreadState, first_names, spread_state
from shardrt.checkpoint.writing import write_file
from shardrt.errors import CheckpointError, ConfigError
from shardrt.plan import Plan
from shardrt.protocols import Partitioner, Place, StateFormat
from shardrt.state.portable import LazyTensor, PortableOptimizer, PortableState
from shardrt.state.tree import pack

Table = TensorTable[LazyTensor]


def write_checkpoint(
    place: Place,
    state: PortableState,
    *,
    world_size: int,
    partitioner: Partitioner,
    state_format: StateFormat,
    step: int | None = None,
    random: Sequence[Any] = (),
    software: Mapping[str, Any] | None = None,
    runtime: Mapping[str, Any] | None = None,
    elementwise: bool | None = None,
    show: bool | None = False,
    block_bytes: int = BLOCK_BYTES,
) -> str:
    """Write the next checkpoint under the root of a place, as ``world_size`` ranks would, and make it the latest.

    Returns its path. ``step`` is that of the optimizers unless it is given. ``random`` are the random states of each
    rank; without one for each there are none, and whoever loads keeps their own. See :func:`spread_state` for what
    ``elementwise`` says.

    Example:
        >>> import shardrt, torch
        >>> from shardrt.checkpoint.offline import write_checkpoint
        >>> from shardrt.choosing import choose_partitioner, choose_place, choose_state_format
        >>> from shardrt.state.portable import LazyTensor, PortableState
        >>> model = torch.nn.Linear(2, 1)
        >>> weights = {name: LazyTensor.of(tensor) for name, tensor in model.state_dict().items()}
        >>> registry = shardrt.load_registry()
        >>> path = write_checkpoint(
        ...     choose_place(registry)("run"),
        ...     PortableState(models={"model": weights}, optimizers={}, extra={"epoch": 3}),
        ...     world_size=4,
        ...     partitioner=choose_partitioner(registry, "greedy"),
        ...     state_format=choose_state_format(registry, "safetensors"),
        ... )
        >>> path.rpartition("/")[2]
        'save-000001-step-000000'
        >>> with shardrt.Runtime() as rt:
        ...     rt.load("run", model=model)
        {'epoch': 3}
    """
    if world_size < 1:
        raise ConfigError(f"a checkpoint is for 1 rank or more, got {world_size}")
    if random and len(random) != world_size:
        raise ConfigError(f"random states of {len(random)} ranks do not fit {world_size} ranks; leave them out")
    if MANIFEST in place.list():
        raise CheckpointError(f"{place.root!r} is itself a checkpoint; write the new one to another directory")
    if step is None:
        step = max((one.step for one in state.optimizers.values()), default=0)
    spread = spread_state(state, world_size, partitioner, elementwise=elementwise)
    laid_out = _lay_out(state, spread, world_size, random)
    series = Series(place)
    try:
        id = uuid.uuid4().hex
        name = series.begin(step, id)
        try:
            files = _write(laid_out.tables, place, str(name), id, state_format, block_bytes, show)
            manifest = merge(
                id=id,
                step=step,
                files=files,
                pieces=laid_out.pieces,
                random=laid_out.random,
                common=laid_out.common,
                state_format=state_format.name,
                block_bytes=block_bytes,
                software=software or {},
                runtime=runtime or {},
            )
            series.commit(name, manifest)
            series.point_to(name)
        except BaseException:
            with suppress(CheckpointError, OSError):  # the error itself is what counts
                series.abandon(name, id)
            raise
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint could not be written to {place.root!r}: {error}; see whether it can be written to"
        ) from error
    return f"{place.root}/{name}"


@attrs.frozen(kw_only=True)
class _LaidOut:
    """What each rank's file is going to hold, and what the manifest says of it."""

    tables: Sequence[Table]
    pieces: Sequence[Mapping[str, Any]]
    common: Mapping[str, Any]
    random: Sequence[Any]


def _lay_out(state: PortableState, spread: SpreadState, world_size: int, random: Sequence[Any]) -> _LaidOut:
    tables = [Table() for _ in range(world_size)]
    pieces: list[dict[str, Any]] = [{"models": {}, "optimizers": {}} for _ in tables]
    for name, tensors in state.models.items():
        for rank, found in enumerate(_model_pieces(name, tensors, spread, tables)):
            pieces[rank]["models"][name] = found
    for name, one in state.optimizers.items():
        for rank, rows in enumerate(_optimizer_pieces(name, one, spread.plans[name], tables)):
            pieces[rank]["optimizers"][name] = {"state": rows}
    first = tables[0]
    common = {
        "models": {name: _model_common(name, tensors, state, first) for name, tensors in state.models.items()},
        "optimizers": {
            name: _optimizer_common(name, one, spread.plans[name], first) for name, one in state.optimizers.items()
        },
        "extra": _packed({} if state.extra is None else state.extra, first, "extra", where="extra"),
    }
    states = [_packed(one, table, "random", where="random states") for one, table in zip(random, tables, strict=False)]
    return _LaidOut(tables=tables, pieces=pieces, common=common, random=states)


def _packed(value: Any, table: Table, name: str, *, where: str) -> Any:
    return pack(
        value,
        lambda tensor: table.add(name, LazyTensor.of(tensor)),
        where=where,
        put_lazy=lambda lazy: table.add(name, lazy),
    )


def _model_pieces(
    model: str, tensors: Mapping[str, LazyTensor], spread: SpreadState, tables: Sequence[Table]
) -> list[dict[str, list[list[Any]]]]:
    found: list[dict[str, list[list[Any]]]] = [{} for _ in tables]
    for name, lazy in first_names(tensors)[0].items():
        for shard in spread.models[model][name]:
            label = label_of(f"{model}/{name}", shard.start, shard.stop, lazy.numel)
            stored = tables[shard.rank].add(label, lazy.part(shard.start, shard.stop))
            found[shard.rank].setdefault(name, []).append([stored, shard.start, shard.stop])
    return found


def _model_common(model: str, tensors: Mapping[str, LazyTensor], state: PortableState, table: Table) -> dict[str, Any]:
    first, aliases = first_names(tensors)
    values = dict(state.values.get(model, {}))
    return {
        "tensors": {name: [lazy.dtype, list(lazy.shape)] for name, lazy in first.items()},
        "buffers": sorted(state.buffers.get(model, frozenset()) & first.keys()),
        "aliases": aliases,
        "values": _packed(values, table, f"{model}/extra_state", where=f"extra state of {model}"),
    }


def _optimizer_pieces(
    optimizer: str, one: PortableOptimizer, plan: Plan, tables: Sequence[Table]
) -> list[list[list[Any]]]:
    """For each rank a row per shard, as :mod:`shardrt.checkpoint.parts` has them."""
    rows: list[list[list[Any]]] = [[] for _ in tables]
    for spec in plan.params:
        values = one.state.get(spec.name, {})
        sliced = {
            key: value for key, value in values.items() if isinstance(value, LazyTensor) and value.shape == spec.shape
        }
        for number, shard in enumerate(plan.partition.by_param[spec.name]):
            table = tables[shard.rank]
            parts = {}
            for key, lazy in sliced.items():
                label = label_of(f"{optimizer}/{spec.name}/{key}", shard.start, shard.stop, spec.numel)
                parts[key] = [table.add(label, lazy.part(shard.start, shard.stop)), lazy.dtype]
            trees = {}
            if number == 0:  # they belong to the parameter as a whole
                for key, value in values.items():
                    if key not in sliced:
                        where = f"optimizer state {key!r} of {spec.name!r}"
                        trees[key] = _packed(value, table, f"{optimizer}/{spec.name}/{key}", where=where)
            rows[shard.rank].append([spec.name, shard.start, shard.stop, parts, trees])
    return rows


def _optimizer_common(optimizer: str, one: PortableOptimizer, plan: Plan, table: Table) -> dict[str, Any]:
    groups = []
    for number, group in enumerate(one.groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        where = f"options of parameter group {number}"
        groups.append([_packed(options, table, f"{optimizer}/options", where=where), list(group["params"])])
    return {
        "class": one.kind,
        "step": one.step,
        "groups": groups,
        "params": {spec.name: [spec.dtype, list(spec.shape)] for spec in plan.params},
        "plan": plan.to_json(),
    }


def _write(
    tables: Sequence[Table],
    place: Place,
    directory: str,
    id: str,
    state_format: StateFormat,
    block_bytes: int,
    show: bool | None,
) -> list[StoredFile]:
    total = sum(lazy.nbytes for table in tables for lazy in table.tensors.values())
    with progress_bar(f"writing {directory}", total, show=show) as advance:
        return [
            write_file(
                place,
                f"{directory}/{file_name(rank, len(tables), state_format)}",
                table.tensors,
                state_format,
                {"format": "shardrt", "id": id, "rank": str(rank)},
                block_bytes=block_bytes,
                advance=advance,
            )
            for rank, table in enumerate(tables)
        ]

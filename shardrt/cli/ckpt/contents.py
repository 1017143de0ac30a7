"""What is in one checkpoint, from its manifest alone: as plain JSON values, and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardrt.checkpoint.manifest import Manifest, Spread, StoredModel, StoredOptimizer, StoredParam
from shardrt.checkpoint.opened import OpenCheckpoint
from shardrt.cli.ckpt.readable import readable
from shardrt.cli.ckpt.telling import counted, size_in_words


def describe_checkpoint(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """Everything but the tensors' bytes, for people to read: values that JSON does not have are shown as text.

    Example:
        >>> import shardrt, torch
        >>> from shardrt.cli.ckpt.contents import describe_checkpoint
        >>> from shardrt.cli.ckpt.opening import open_path
        >>> with shardrt.Runtime() as rt:
        ...     _ = rt.save("run", model=torch.nn.Linear(2, 1), extra={"epoch": 3})
        >>> document = describe_checkpoint(open_path("run", None, shardrt.load_registry()))
        >>> document["extra"], document["models"]["model"]["tensors"]["weight"]["shape"]
        ({'epoch': 3}, [1, 2])
    """
    manifest = checkpoint.manifest
    return {
        "path": checkpoint.where,
        "id": manifest.id,
        "step": manifest.step,
        "created": manifest.created,
        "ranks": manifest.world_size,
        "state_format": manifest.state_format,
        "bytes": sum(file.size for file in manifest.files),
        "software": dict(manifest.software),
        "runtime": dict(manifest.runtime),
        "random_states": len(manifest.random),
        "extra": readable(manifest.extra, manifest, 0),
        "models": {name: _model(model, manifest) for name, model in manifest.models.items()},
        "optimizers": {name: _optimizer(one, manifest) for name, one in manifest.optimizers.items()},
        "files": [{"name": file.name, "bytes": file.size, "tensors": len(file.tensors)} for file in manifest.files],
    }


def _spread(spread: Spread, manifest: Manifest) -> dict[str, Any]:
    return {
        "dtype": spread.spec.dtype,
        "shape": list(spread.spec.shape),
        "bytes": spread.spec.nbytes,
        "files": [manifest.files[number].name for number in dict.fromkeys(piece.file for piece in spread.pieces)],
    }


def _model(model: StoredModel, manifest: Manifest) -> dict[str, Any]:
    return {
        "tensors": {
            name: {**_spread(spread, manifest), "buffer": name in model.buffers}
            for name, spread in model.tensors.items()
        },
        "aliases": dict(model.aliases),
        "values": readable(model.values, manifest, 0),
    }


def _optimizer(one: StoredOptimizer, manifest: Manifest) -> dict[str, Any]:
    return {
        "class": one.kind,
        "step": one.step,
        "partitioner": one.plan.get("partitioner") if isinstance(one.plan, dict) else None,
        "groups": [
            {"options": readable(options, manifest, 0), "params": list(params)} for options, params in one.groups
        ],
        "params": {name: _param(param, manifest) for name, param in one.params.items()},
    }


def _param(param: StoredParam, manifest: Manifest) -> dict[str, Any]:
    sliced = {key: _spread(spread, manifest) for key, spread in param.sliced.items()}
    trees = {key: readable(tree, manifest, file) for key, (file, tree) in param.trees.items()}
    return {"dtype": param.dtype, "shape": list(param.shape), "state": {**sliced, **trees}}


def show_checkpoint(document: Mapping[str, Any], limit: int) -> None:
    """Print what :func:`describe_checkpoint` gave, tables cut after so many rows."""
    console = Console()

    def line(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    line(document["path"])
    ranks, size = counted(document["ranks"], "rank"), size_in_words(document["bytes"])
    line(f"step {document['step']}, {ranks}, {size} in {document['state_format']}, created {document['created']}")
    chosen = {
        key: value["name"] for key, value in document["runtime"].items() if isinstance(value, dict) and "name" in value
    }
    versions = {key: value for key, value in document["software"].items() if isinstance(value, str)}
    line(", ".join(f"{key} {value}" for key, value in {**versions, **chosen}.items()))
    for name, model in document["models"].items():
        _show_model(console, name, model, limit, len(document["files"]))
    for name, one in document["optimizers"].items():
        _show_optimizer(console, name, one)
    if document["extra"]:
        line(f"extra: {_short(document['extra'])}")
    if document["random_states"]:
        line(f"random states of {counted(document['random_states'], 'rank')}")


def _show_model(console: Console, name: str, model: Mapping[str, Any], limit: int, files: int) -> None:
    tensors = model["tensors"]
    total = size_in_words(sum(row["bytes"] for row in tensors.values()))
    console.print()
    console.print(Text(f"model {name!r}: {counted(len(tensors), 'tensor')}, {total}"), soft_wrap=True)
    table = Table(pad_edge=False)
    for heading in ("tensor", "dtype", "shape"):
        table.add_column(heading, overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("in files of ranks", no_wrap=True)
    for key, row in list(tensors.items())[:limit]:
        kind = f"{key} (buffer)" if row["buffer"] else key
        stored = "all" if len(row["files"]) == files > 1 else ", ".join(map(_rank_of, row["files"]))
        table.add_row(Text(kind), row["dtype"], _shape(row["shape"]), size_in_words(row["bytes"]), stored)
    console.print(table)
    if len(tensors) > limit:
        console.print(f"and {len(tensors) - limit} more; see --limit and --json", highlight=False)
    for alias, key in model["aliases"].items():
        console.print(Text(f"{alias} is {key}"), soft_wrap=True)
    if model["values"]:
        console.print(Text(f"values: {_short(model['values'])}"), soft_wrap=True)


def _show_optimizer(console: Console, name: str, one: Mapping[str, Any]) -> None:
    console.print()
    by = f", by {one['partitioner']}" if one["partitioner"] else ""
    kind = one["class"] or "unknown class"
    params = counted(len(one["params"]), "parameter")
    console.print(Text(f"optimizer {name!r}: {kind}, step {one['step']}, {params}{by}"), soft_wrap=True)
    for number, group in enumerate(one["groups"]):
        options = ", ".join(f"{key}={_short(value)}" for key, value in group["options"].items())
        console.print(Text(f"group {number}, {counted(len(group['params']), 'parameter')}: {options}"), soft_wrap=True)
    kept: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for param in one["params"].values():
        for key, value in param["state"].items():
            kept[key] += 1
            sizes[key] += value["bytes"] if isinstance(value, dict) and "bytes" in value else 0
    if kept:
        shown = ", ".join(
            f"{key} of {count}" + (f" ({size_in_words(sizes[key])})" if sizes[key] else "")
            for key, count in kept.items()
        )
        console.print(Text(f"state: {shown}"), soft_wrap=True)


def _rank_of(file: str) -> str:
    number = file.removeprefix("rank-").partition("-of-")[0]
    return str(int(number)) if number.isdigit() else file


def _shape(shape: list[int]) -> str:
    return " x ".join(map(str, shape)) if shape else "scalar"


def _short(value: Any, longest: int = 300) -> str:
    text = str(value)
    return text if len(text) <= longest else f"{text[:longest]}..."

"""``shardrt ckpt consolidate``: everything in one file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shardrt.cli.ckpt.options import json_option, step_option
from shardrt.cli.ckpt.telling import tell_written
from shardrt.errors import ConfigError

if TYPE_CHECKING:
    from shardrt.checkpoint.opened import OpenCheckpoint
    from shardrt.registry import Registry


@click.command()
@click.argument("path")
@click.argument("out")
@click.option(
    "--what",
    type=click.Choice(["model", "optimizer", "both"]),
    default=None,
    help="What to write; by default both, or the model where the format has room for weights only.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["shardrt", "safetensors"]),
    default="shardrt",
    show_default=True,
    help="A checkpoint for one rank, or the model's weights as one safetensors file.",
)
@click.option("--model", default=None, help="Which model's weights, where there are several.")
@step_option
@json_option
def consolidate(
    path: str, out: str, what: str | None, kind: str, model: str | None, step: int | None, as_json: bool
) -> None:
    """Write everything into one file: a checkpoint for one rank, or the weights alone.

    As a checkpoint it becomes the next, and the latest, of the directory OUT; as safetensors OUT is a file that is not
    there yet. Files of torch are written by export.
    """
    import shardrt
    from shardrt.cli.ckpt.opening import open_path

    if kind == "safetensors" and what in ("optimizer", "both"):
        raise click.UsageError(f"a safetensors file has room for weights only; --what {what} needs --format shardrt")
    if kind == "shardrt" and model is not None:
        raise click.UsageError("--model chooses whose weights go into a safetensors file; add --format safetensors")
    registry = shardrt.load_registry()
    checkpoint = open_path(path, step, registry)
    show = False if as_json else None
    if kind == "safetensors":
        written, notes = write_weights(checkpoint, out, model, registry, show=show)
    else:
        written, notes = _write_checkpoint(checkpoint, out, what or "both", registry, show=show)
    document = {
        "source": checkpoint.where,
        "source_ranks": checkpoint.manifest.world_size,
        "path": written,
        "notes": notes,
        **({"ranks": 1} if kind == "shardrt" else {}),
    }
    tell_written(document, as_json)


def _write_checkpoint(
    checkpoint: OpenCheckpoint, out: str, what: str, registry: Registry, *, show: bool | None
) -> tuple[str, list[str]]:
    import attrs

    from shardrt.checkpoint.offline import write_checkpoint
    from shardrt.choosing import choose_partitioner, choose_place
    from shardrt.cli.ckpt.opening import made_by, random_notes, software, told_source

    state, manifest = checkpoint.portable(), checkpoint.manifest
    if what == "model":
        state = attrs.evolve(state, optimizers={})
    if what == "optimizer":
        state = attrs.evolve(state, models={}, buffers={}, values={})
    random, notes = random_notes(checkpoint, 1)
    path = write_checkpoint(
        choose_place(registry)(out),
        state,
        world_size=1,
        partitioner=choose_partitioner(registry, "greedy"),
        state_format=checkpoint.state_format,
        step=manifest.step,
        random=random,
        software=software(registry),
        runtime=made_by("consolidate", "greedy", manifest.state_format, told_source(checkpoint)),
        show=show,
    )
    return path, notes


def write_weights(
    checkpoint: OpenCheckpoint, out: str, model: str | None, registry: Registry, *, show: bool | None
) -> tuple[str, list[str]]:
    """One safetensors file with a model's tensors; returns its path and what did not fit in."""
    from shardrt.checkpoint.blocks import BLOCK_BYTES
    from shardrt.checkpoint.progress import progress_bar
    from shardrt.checkpoint.spreading import first_names
    from shardrt.checkpoint.writing import write_file
    from shardrt.choosing import choose_place, choose_state_format

    state = checkpoint.portable()
    chosen = _chosen_model(state.models, model, checkpoint.where)
    tensors, aliases = first_names(state.models[chosen])
    directory, _, name = out.rpartition("/")
    place = choose_place(registry)(directory or ("/" if out.startswith("/") else "."))
    if not name or name in place.list() or f"{name}/" in place.list():
        raise ConfigError(f"{out!r} is there already, or is no name of a file; name one that is not there")
    total = sum(lazy.nbytes for lazy in tensors.values())
    with progress_bar(f"writing {name}", total, show=show) as advance:
        write_file(
            place,
            name,
            tensors,
            choose_state_format(registry, "safetensors"),
            {**aliases, "format": "pt"},  # as Hugging Face's libraries write tied weights, and look for before reading
            block_bytes=BLOCK_BYTES,
            advance=advance,
        )
    values = state.values.get(chosen)
    notes = [f"a safetensors file has no room for {', '.join(map(repr, values))}: left out"] if values else []
    return f"{place.root}/{name}", notes


def _chosen_model(models: Any, wanted: str | None, where: str) -> str:
    there = ", ".join(map(repr, models)) or "none"
    if wanted is not None and wanted not in models:
        raise ConfigError(f"{where!r} has no model {wanted!r}; models in it: {there}")
    if wanted is None and len(models) != 1:
        raise ConfigError(f"{where!r} has not one model but these: {there}; choose with --model")
    return wanted if wanted is not None else str(next(iter(models)))

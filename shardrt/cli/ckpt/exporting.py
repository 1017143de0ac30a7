"""``shardrt ckpt export``: a checkpoint as another program reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from shardrt.cli.ckpt.options import json_option, step_option
from shardrt.cli.ckpt.telling import tell_written
from shardrt.errors import ConfigError

if TYPE_CHECKING:
    from shardrt.state.portable import PortableState


@click.command()
@click.argument("path")
@click.argument("out")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["torch", "dcp", "hf"]),
    required=True,
    help="State dicts by torch.save, a directory of torch.distributed.checkpoint, or Hugging Face's safetensors.",
)
@click.option("--model", default=None, help="Which model, where there are several.")
@click.option("--optimizer", default=None, help="Which optimizer, where there are several.")
@click.option("--prefix", default="", help="With dcp: the key that everything goes under.")
@click.option("--flatten", is_flag=True, help="With dcp: the optimizer's state as flatten_optimizer_state_dict.")
@click.option(
    "--max-shard-gb", type=click.FloatRange(min=0, min_open=True), default=5.0, help="With hf: a file's size."
)
@step_option
@json_option
def export(
    path: str,
    out: str,
    kind: str,
    model: str | None,
    optimizer: str | None,
    prefix: str,
    flatten: bool,
    max_shard_gb: float,
    step: int | None,
    as_json: bool,
) -> None:
    """Write a checkpoint as another program reads it.

    OUT is a directory. For torch it gets model.pt and optimizer.pt, whichever there are, and for dcp it must not exist.
    """
    import shardrt
    from shardrt import interchange
    from shardrt.cli.ckpt.opening import open_path

    checkpoint = open_path(path, step, shardrt.load_registry())
    state = chosen(checkpoint.portable(), model, optimizer)
    if kind != "dcp" and (len(state.models) > 1 or (kind == "torch" and len(state.optimizers) > 1)):
        raise ConfigError(
            f"{checkpoint.where!r} has the models {', '.join(state.models)} and the optimizers "
            f"{', '.join(state.optimizers) or 'none'}, and {kind} has room for one of each; choose with --model and "
            "--optimizer"
        )
    if kind == "torch":
        _write_torch(state, Path(out))
    elif kind == "dcp":
        interchange.write_dcp(state, out, prefix=prefix, flatten=flatten)
    else:
        interchange.write_hf(state, out, max_shard_bytes=max_shard_gb * 1e9)
    document = {
        "source": checkpoint.where,
        "source_ranks": checkpoint.manifest.world_size,
        "kind": kind,
        "path": out,
        "notes": left_out(state, kind),
    }
    tell_written(document, as_json)


def chosen(state: PortableState, model: str | None, optimizer: str | None) -> PortableState:
    """What of a state is meant: everything, or one model and one optimizer by name.

    Example:
        >>> from shardrt.cli.ckpt.exporting import chosen
        >>> from shardrt.state.portable import PortableState
        >>> list(chosen(PortableState(models={"a": {}, "b": {}}, optimizers={}), "b", None).models)
        ['b']
    """
    changes: dict[str, Any] = {}
    for kind, name, there in (("models", model, state.models), ("optimizers", optimizer, state.optimizers)):
        if name is not None:
            if name not in there:
                raise ConfigError(f"there is no {kind[:-1]} {name!r}; {kind}: {', '.join(there) or 'none'}")
            changes[kind] = {name: there[name]}
    return attrs.evolve(state, **changes)


def _write_torch(state: PortableState, directory: Path) -> None:
    from shardrt.interchange import write_torch

    model = directory / "model.pt" if state.models else None
    optimizer = directory / "optimizer.pt" if state.optimizers else None
    there = [str(file) for file in (model, optimizer) if file is not None and file.exists()]
    if there:
        raise ConfigError(f"{', '.join(there)} is there already; name another directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error}; name another directory") from error
    write_torch(state, model, optimizer)


def left_out(state: PortableState, kind: str) -> list[str]:
    """What a kind of file has no place for.

    Example:
        >>> from shardrt.cli.ckpt.exporting import left_out
        >>> from shardrt.state.portable import PortableState
        >>> left_out(PortableState(models={}, optimizers={}, extra={"epoch": 3}), "torch")
        ['random states are not exported', 'extra is not exported: torch has no place for it']
    """
    notes = ["random states are not exported"]
    if state.extra and kind != "dcp":
        notes.append(f"extra is not exported: {kind} has no place for it")
    if state.optimizers and kind == "hf":
        notes.append("optimizers are not exported: hf is for weights")
    if any(state.values.values()):
        notes.append("what modules keep beside tensors (get_extra_state) is not exported")
    return notes

"""``shardrt ckpt import``: a checkpoint from what another program has written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardrt.cli.ckpt.options import json_option, partition_options
from shardrt.cli.ckpt.telling import tell_written

if TYPE_CHECKING:
    from shardrt.state.portable import PortableState


@click.command(name="import")
@click.argument("source")
@click.argument("out")
@click.option("--optimizer", default=None, help="A file of torch.save with the optimizer's state dict.")
@click.option(
    "--names",
    type=click.Path(exists=True, dir_okay=False),
    default=None,
    help="A text file with the optimizer's parameters in its order, one per line, where SOURCE numbers them.",
)
@click.option(
    "--optimizer-class", default="", help="Such as torch.optim.AdamW: parameters of elementwise ones may be cut."
)
@click.option("--ranks", type=click.IntRange(min=1), default=1, show_default=True, help="How many ranks it is for.")
@click.option("--at-step", type=click.IntRange(min=0), default=None, help="The updates made by then, if known better.")
@partition_options
@json_option
def import_(
    source: str,
    out: str,
    optimizer: str | None,
    names: str | None,
    optimizer_class: str,
    ranks: int,
    at_step: int | None,
    partitioner: str,
    elementwise: bool,
    as_json: bool,
) -> None:
    """Make a checkpoint of what another program has written.

    SOURCE is a file of torch.save, a directory with model.pt and optimizer.pt as `shardrt ckpt export` writes it, a
    directory of torch.distributed.checkpoint, or Hugging Face's safetensors. Nothing in it is executed. The new
    checkpoint becomes the next, and the latest, of the directory OUT.
    """
    import shardrt
    from shardrt.checkpoint.offline import write_checkpoint
    from shardrt.choosing import choose_partitioner, choose_place, choose_state_format
    from shardrt.cli.ckpt.opening import made_by, software

    registry = shardrt.load_registry()
    chosen = choose_partitioner(registry, partitioner)
    kind, state = read_foreign(source, optimizer, names, optimizer_class)
    written = write_checkpoint(
        choose_place(registry)(out),
        state,
        world_size=ranks,
        partitioner=chosen,
        state_format=choose_state_format(registry, "safetensors"),
        step=at_step,
        software=software(registry),
        runtime=made_by("import", partitioner, "safetensors", {"kind": kind}),
        elementwise=elementwise or None,
        show=False if as_json else None,
    )
    notes = ["there are no random states in it: ranks that load it keep their own"]
    tell_written({"source": source, "kind": kind, "path": written, "ranks": ranks, "notes": notes}, as_json)


def read_foreign(
    source: str, optimizer: str | None, names: str | None, optimizer_class: str
) -> tuple[str, PortableState]:
    """Which program it is from, and what is in it, read when it is wanted."""
    import attrs

    from shardrt import interchange
    from shardrt.interchange.detecting import TORCH_FILES

    kind = interchange.detect(source)
    listed = None if names is None else Path(names).read_text(encoding="utf-8").split("\n")
    called = None if listed is None else [name.strip() for name in listed if name.strip()]
    if optimizer is not None and kind != "torch":
        raise click.UsageError(f"--optimizer is for files of torch.save, and {source!r} is {kind}; leave it out")
    if kind == "hf" and called is not None:
        raise click.UsageError(f"--names are an optimizer's, and {source!r} has weights only; leave it out")
    state: PortableState
    if kind == "torch" and Path(source).is_dir():
        model, beside = (path if path.is_file() else None for path in (Path(source) / name for name in TORCH_FILES))
        state = interchange.read_torch(model, optimizer or beside, names=called)
    elif kind == "torch":
        state = interchange.read_torch(source, optimizer, names=called)
    elif kind == "dcp":
        state = interchange.read_dcp(source, names=called)
    else:
        state = interchange.read_hf(source)
    if not optimizer_class:
        return kind, state
    known = {name: attrs.evolve(one, kind=optimizer_class) for name, one in state.optimizers.items()}
    return kind, attrs.evolve(state, optimizers=known)

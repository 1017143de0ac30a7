"""``shardrt ckpt reshard``: the same state, stored for another number of ranks."""

from __future__ import annotations

import click

from shardrt.cli.ckpt.options import json_option, partition_options, step_option
from shardrt.cli.ckpt.telling import tell_written


@click.command()
@click.argument("path")
@click.argument("out")
@click.option("--ranks", type=click.IntRange(min=1), required=True, help="How many ranks it is going to be for.")
@partition_options
@step_option
@json_option
def reshard(
    path: str, out: str, ranks: int, partitioner: str, elementwise: bool, step: int | None, as_json: bool
) -> None:
    """Write a checkpoint anew, as another number of ranks would have saved it.

    rt.load takes any checkpoint on any number of ranks: this only spares them reading files in pieces. The new one
    becomes the next, and the latest, of the directory OUT. Loading it gives the same state bit for bit.
    """
    import shardrt
    from shardrt.checkpoint.offline import write_checkpoint
    from shardrt.choosing import choose_partitioner, choose_place
    from shardrt.cli.ckpt.opening import made_by, open_path, random_notes, software, told_source

    registry = shardrt.load_registry()
    chosen = choose_partitioner(registry, partitioner)
    checkpoint = open_path(path, step, registry)
    manifest = checkpoint.manifest
    random, notes = random_notes(checkpoint, ranks)
    written = write_checkpoint(
        choose_place(registry)(out),
        checkpoint.portable(),
        world_size=ranks,
        partitioner=chosen,
        state_format=checkpoint.state_format,
        step=manifest.step,
        random=random,
        software=software(registry),
        runtime=made_by("reshard", partitioner, manifest.state_format, told_source(checkpoint)),
        elementwise=elementwise or None,
        show=False if as_json else None,
    )
    document = {
        "source": checkpoint.where,
        "source_ranks": manifest.world_size,
        "path": written,
        "ranks": ranks,
        "notes": notes,
    }
    tell_written(document, as_json)

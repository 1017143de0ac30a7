"""``shardrt ckpt``: checkpoints without ranks. One process, memory for a block of a tensor, never for a whole one."""

from __future__ import annotations

from types import MappingProxyType

import click

from shardrt.cli import LazyGroup

COMMANDS = MappingProxyType(
    {
        "inspect": ("shardrt.cli.ckpt.inspect:inspect", "Tell what is in a checkpoint, or which there are."),
        "verify": ("shardrt.cli.ckpt.verify:verify", "Compare every byte with the checksums it was written with."),
        "diff": ("shardrt.cli.ckpt.diff:diff", "Tell what differs between two checkpoints, and by how much."),
        "reshard": ("shardrt.cli.ckpt.reshard:reshard", "Write a checkpoint anew, for another number of ranks."),
        "consolidate": ("shardrt.cli.ckpt.consolidate:consolidate", "Write everything into one file."),
        "import": ("shardrt.cli.ckpt.importing:import_", "Make a checkpoint of what another program has written."),
        "export": ("shardrt.cli.ckpt.exporting:export", "Write a checkpoint as another program reads it."),
    }
)
"""As those of ``shardrt`` itself."""


@click.group(cls=LazyGroup, lazy=COMMANDS)
def ckpt() -> None:
    """Look at checkpoints, verify, compare and convert them: offline, in one process, with bounded memory.

    Exit codes: 0 fine; 1 an error, a difference or damage; 2 wrong usage.
    """

"""The command ``shardrt``. Each subcommand is imported when it is run, so that looking around needs no torch."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import click

import shardrt
from shardrt.errors import ShardrtError
from shardrt.registry.nearness import did_you_mean

COMMANDS = MappingProxyType(
    {
        "bench": ("shardrt.cli.bench:bench", "Time steps here, and compare."),
        "ckpt": ("shardrt.cli.ckpt:ckpt", "Look at, verify, compare and convert checkpoints."),
        "demo": ("shardrt.cli.demo:demo", "Train a small model on a few ranks of this machine."),
        "doctor": ("shardrt.cli.doctor:doctor", "Find out what works here, and what would make the rest work."),
        "plan": ("shardrt.cli.plan:plan", "Show which rank would own what of a model."),
        "plugins": ("shardrt.cli.plugins:plugins", "List what installed plugins offer."),
        "trace": ("shardrt.cli.trace:trace", "Tell how much communication a recorded run hid, and draw it."),
    }
)
"""Name to where the command is and what it does; the summary is here so that ``--help`` imports no command."""

_JSON = "shardrt.cli.json"


class LazyGroup(click.Group):
    """Imports a command when it is run, and turns errors of ours into one clear message. ``lazy`` is like COMMANDS.

    Example:
        >>> from click.testing import CliRunner
        >>> from shardrt.cli import main
        >>> result = CliRunner().invoke(main, ["plugin"])
        >>> result.exit_code, "did you mean 'plugins'?" in result.stderr
        (2, True)
    """

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, without importing anything."""
        return sorted(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, imported now."""
        if cmd_name not in self.lazy:
            return None
        module, _, attribute = self.lazy[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands for ``--help``, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self.lazy.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, and note whether its answer is to be JSON before anything can fail."""
        ctx.meta[_JSON] = "--json" in args
        if args[0] not in self.lazy:
            ctx.fail(f"no command {args[0]!r}; commands: {', '.join(self.lazy)}{did_you_mean(args[0], self.lazy)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of our own tree is the user's to read, not a crash."""
        try:
            return super().invoke(ctx)
        except ShardrtError as error:
            if ctx.meta.get(_JSON):
                click.echo(json.dumps({"error": str(error), "type": type(error).__name__}))
            else:
                click.echo(f"error: {error}", err=True)
            ctx.exit(1)


@click.group(name="shardrt", cls=LazyGroup, lazy=COMMANDS)
@click.version_option(shardrt.__version__, prog_name="shardrt")
def main() -> None:
    """A plugin-based, backend-agnostic sharding runtime for PyTorch training."""

"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., Any]


def json_option(command: Command) -> Command:
    """``--json``, as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")(command)


def step_option(command: Command) -> Command:
    """``--step``, which checkpoint of several."""
    text = "The newest checkpoint of this step, instead of the latest."
    return click.option("--step", type=click.IntRange(min=0), default=None, help=text)(command)


def partition_options(command: Command) -> Command:
    """``--partitioner`` and ``--elementwise``."""
    named = click.option(
        "--partitioner", default="greedy", show_default=True, help="Who stores what: see `shardrt plugins`."
    )
    said = click.option(
        "--elementwise",
        is_flag=True,
        help="The optimizer's update of an element looks at that element alone: its parameters may be cut.",
    )
    return named(said(command))

"""``shardrt plan``: which rank would own what of a model, and what that saves, before anything is trained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from shardrt.cli.ckpt.options import json_option, partition_options
from shardrt.cli.ckpt.telling import size_in_words

if TYPE_CHECKING:
    import torch

    from shardrt.plan import ParamSpec, Plan

_NO_OPTIMIZER = "give its class, such as torch.optim:AdamW"


@click.command()
@click.argument("model")
@click.option("--ranks", type=click.IntRange(min=1), required=True, help="How many ranks it is for.")
@click.option(
    "--optimizer",
    default="torch.optim:AdamW",
    show_default=True,
    metavar="MODULE:CLASS",
    help="Whose state is divided; whether parameters may be cut follows from it.",
)
@click.option("--bucket-mb", type=click.FloatRange(min=0, min_open=True), default=None, help="Default: one per dtype.")
@click.option("--limit", type=click.IntRange(min=1), default=16, show_default=True, help="Rows of the tables.")
@partition_options
@json_option
def plan(
    model: str,
    ranks: int,
    optimizer: str,
    bucket_mb: float | None,
    limit: int,
    partitioner: str,
    elementwise: bool,
    as_json: bool,
) -> None:
    """Show which rank owns what of a model, and what it holds and sends.

    MODEL is a function, a class or a module of your own, as MODULE:NAME, which is built without memory for its values;
    or weights in a file of torch.save, in Hugging Face's safetensors or in a directory of
    torch.distributed.checkpoint, of which no value is read. Figures are those of rt.optimizer (ZeRO-1).
    """
    import shardrt
    from shardrt.choosing import choose_partitioner
    from shardrt.optim.planner import Planner
    from shardrt.optim.reach import check_shardable, reach_of

    chosen = choose_partitioner(shardrt.load_registry(), partitioner)
    optimizer_class = _optimizer_class(optimizer)
    reach = reach_of(optimizer_class, elementwise or None)
    check_shardable(optimizer_class, reach)
    made = Planner(
        partitioner=chosen,
        world_size=ranks,
        bucket_bytes=None if bucket_mb is None else max(1, int(bucket_mb * 2**20)),
        optimizer_class=optimizer_class,
        reach=reach,
    ).plan(params_of(model))
    document = describe_plan(made, model=model, optimizer=optimizer, state_per_byte=state_per_byte(optimizer_class))
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _show(document, limit)


def params_of(model: str) -> list[ParamSpec]:
    """The parameters of a model that is named by where it is made, or by the file that holds its weights."""
    if ":" in model and not model.partition(":")[2].startswith(("/", "\\")):
        return _built(model)
    from shardrt.cli.ckpt.importing import read_foreign
    from shardrt.errors import ConfigError
    from shardrt.plan import ParamSpec

    _, state = read_foreign(model, None, None, "")
    weights = state.models.get("model", {})
    if not weights:
        raise ConfigError(f"{model!r} holds no weights; give a file or directory with a model's")
    one_of_each: dict[int, ParamSpec] = {}  # a tensor that is there by several names is one parameter
    for name, tensor in weights.items():
        one_of_each.setdefault(id(tensor), ParamSpec(name=name, shape=tensor.shape, dtype=tensor.dtype))
    return list(one_of_each.values())


def _built(model: str) -> list[ParamSpec]:
    import torch

    from shardrt.errors import ConfigError
    from shardrt.plan import ParamSpec

    found = _imported(model, "give MODULE:NAME, where NAME makes the model, or a file with its weights")
    if not isinstance(found, torch.nn.Module):
        try:
            with torch.device("meta"):
                found = found()
        except Exception as error:
            raise ConfigError(
                f"{model} failed: {type(error).__name__}: {error}; give a function that needs no arguments and returns "
                "the model"
            ) from error
    if not isinstance(found, torch.nn.Module):
        raise ConfigError(f"{model} gave a {type(found).__name__} instead of a torch.nn.Module")
    specs = [
        ParamSpec(
            name=name,
            shape=tuple(param.shape),
            dtype=str(param.dtype).removeprefix("torch."),
            trainable=param.requires_grad,
        )
        for name, param in found.named_parameters()
    ]
    if not specs:
        raise ConfigError(f"{model} has no parameters to plan for")
    return specs


def _imported(where: str, fix: str) -> Any:
    import importlib
    import sys
    from functools import reduce
    from pathlib import Path

    from shardrt.errors import ConfigError

    module, _, name = where.partition(":")
    if not module or not name:
        raise ConfigError(f"{where!r} is no place to import from; {fix}")
    here = str(Path.cwd())
    sys.path.insert(0, here)  # as `python -m` has it
    try:
        return reduce(getattr, name.split("."), importlib.import_module(module))
    except Exception as error:
        raise ConfigError(f"{where!r} cannot be imported: {type(error).__name__}: {error}; {fix}") from error
    finally:
        sys.path.remove(here)


def _optimizer_class(where: str) -> type[torch.optim.Optimizer]:
    import torch

    from shardrt.errors import ConfigError

    found = _imported(where, _NO_OPTIMIZER)
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
        raise ConfigError(f"--optimizer {where} is a {type(found).__name__} and no optimizer class; {_NO_OPTIMIZER}")
    return found


def state_per_byte(optimizer_class: type[torch.optim.Optimizer]) -> float | None:
    """Bytes of state that one byte of a parameter comes to have, seen in one step; None where it needs more to be made.

    Example:
        >>> import torch
        >>> from shardrt.cli.plan import state_per_byte
        >>> state_per_byte(torch.optim.AdamW), state_per_byte(torch.optim.SGD)
        (2.0, 0.0)
    """
    import torch

    param = torch.nn.Parameter(torch.ones(64, 64))
    param.grad = torch.ones_like(param)
    try:
        optimizer = optimizer_class([param])  # type: ignore[call-arg]
        optimizer.step()
    except Exception:
        return None
    held = [value for value in optimizer.state[param].values() if isinstance(value, torch.Tensor)]
    return sum(value.nbytes for value in held if value.dim()) / param.nbytes


def describe_plan(made: Plan, *, model: str, optimizer: str, state_per_byte: float | None) -> dict[str, Any]:
    """A plan and what follows from it, as plain JSON values."""
    whole, others = made.nbytes, made.world_size - 1
    ranks = [
        {
            "rank": rank,
            "shards": len(made.partition.owned_by(rank)),
            "bytes": owned,
            "state_bytes": None if state_per_byte is None else round(owned * state_per_byte),
            "sent_bytes": whole - owned + owned * others,
        }
        for rank, owned in enumerate(made.bytes_per_rank)
    ]
    return {
        "model": model,
        "optimizer": optimizer,
        "partitioner": made.partitioner,
        "fingerprint": made.fingerprint,
        "world_size": made.world_size,
        "parameters": len(made.params),
        "trained_bytes": whole,
        "state_bytes_unsharded": None if state_per_byte is None else round(whole * state_per_byte),
        "imbalance": made.imbalance,
        "ranks": ranks,
        "buckets": [
            {"bytes": bucket.nbytes, "dtype": bucket.dtype, "parameters": len(bucket.params)} for bucket in made.buckets
        ],
    }


def _show(document: Mapping[str, Any], limit: int) -> None:
    from rich.console import Console

    console = Console()
    click.echo(
        f"{document['model']}: {document['parameters']:,} parameters, {size_in_words(document['trained_bytes'])} "
        f"trained, over {document['world_size']} ranks by {document['partitioner']}; imbalance "
        f"{document['imbalance']:.3f}; plan {document['fingerprint']}"
    )
    state = document["state_bytes_unsharded"]
    rows = [
        [
            str(one["rank"]),
            f"{one['shards']:,}",
            size_in_words(one["bytes"]),
            "?" if one["state_bytes"] is None else size_in_words(one["state_bytes"]),
            size_in_words(one["sent_bytes"]),
        ]
        for one in document["ranks"]
    ]
    _table(
        console, "What each rank owns and sends in a step", ["rank", "shards", "owns", "state", "sends"], rows, limit
    )
    buckets = [
        [str(index), f"{one['parameters']:,}", one["dtype"], size_in_words(one["bytes"])]
        for index, one in enumerate(document["buckets"])
    ]
    _table(console, "What travels together", ["bucket", "parameters", "dtype", "size"], buckets, limit)
    if state is None:
        click.echo(f"{document['optimizer']} could not be tried without arguments: its state is not known")
    else:
        click.echo(f"Without sharding every rank would hold {size_in_words(state)} of state.")


def _table(console: Any, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], limit: int) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows[:limit]:
        table.add_row(*row)
    console.print(table)
    if len(rows) > limit:
        click.echo(f"... and {len(rows) - limit:,} more; --limit shows them")

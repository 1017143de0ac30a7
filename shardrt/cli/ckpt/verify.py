"""``shardrt ckpt verify``: every byte against the checksums it was written with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from shardrt.cli.ckpt.options import json_option, step_option
from shardrt.cli.ckpt.telling import counted, size_in_words

if TYPE_CHECKING:
    from shardrt.protocols import Place
    from shardrt.registry import Registry


@click.command()
@click.argument("path")
@step_option
@click.option("--all", "every", is_flag=True, help="Verify every complete checkpoint under PATH.")
@json_option
def verify(path: str, step: int | None, every: bool, as_json: bool) -> None:
    """Compare every byte with the checksums it was written with.

    PATH is what was given to rt.save, of which the latest checkpoint is verified, or the directory of one checkpoint.
    Each damaged file and tensor is named. Exit code 1 if there is damage.
    """
    import shardrt
    from shardrt.checkpoint.series import Series
    from shardrt.choosing import choose_place

    if every and step is not None:
        raise click.UsageError("--all and --step exclude each other; give one of them")
    registry = shardrt.load_registry()
    place = choose_place(registry)(path)
    directories, notes = _which(place, step, every)
    found = [_verified(place, registry, directory, show=False if as_json else None) for directory in directories]
    pointer = Series(place).pointer_problem()
    document = {
        "path": place.root,
        "ok": all(one["ok"] for one in found) and pointer is None,
        "checkpoints": found,
        "pointer": pointer,
        "notes": notes,
    }
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _show(document)
    if not document["ok"]:
        click.get_current_context().exit(1)


def _which(place: Place, step: int | None, every: bool) -> tuple[list[str], list[str]]:
    from shardrt.checkpoint.series import MANIFEST, Series
    from shardrt.cli.ckpt.opening import directory_in

    chosen = directory_in(place, step)
    if not every:
        return [chosen], []
    if MANIFEST in place.list():
        raise click.UsageError(f"{place.root!r} is one checkpoint; --all is for the directory that has several")
    series = Series(place)
    complete = series.committed()
    left = [f"{name} is not complete, and was not verified" for name in series.names() if name not in complete]
    return [str(name) for name in complete], left


def _verified(place: Place, registry: Registry, directory: str, *, show: bool | None) -> dict[str, Any]:
    from shardrt.checkpoint.opened import open_checkpoint
    from shardrt.checkpoint.progress import progress_bar
    from shardrt.checkpoint.series import MANIFEST
    from shardrt.checkpoint.verifying import Problem, verify_checkpoint
    from shardrt.errors import CheckpointError

    name = directory or place.root.rpartition("/")[2]
    try:
        checkpoint = open_checkpoint(place, registry, directory)
    except CheckpointError as error:
        problems = [Problem(file=MANIFEST, tensor=None, error=str(error))]
        return _result(name, problems, {"files": None, "tensors": None, "bytes": None})
    total = checkpoint.total_bytes()
    with progress_bar(f"verifying {name}", total, show=show) as advance:
        problems = list(verify_checkpoint(checkpoint, advance))
    files = checkpoint.manifest.files
    counts = {"files": len(files), "tensors": sum(len(file.tensors) for file in files), "bytes": total}
    return _result(name, problems, counts)


def _result(name: str, problems: list[Any], counts: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ok": not problems, **counts, "problems": [problem.to_json() for problem in problems]}


def _show(document: dict[str, Any]) -> None:
    for one in document["checkpoints"]:
        if one["bytes"] is None:
            click.echo(f"{one['name']}: DAMAGED")
        else:
            size = size_in_words(one["bytes"])
            state = "all as it was written" if one["ok"] else f"DAMAGED, {counted(len(one['problems']), 'problem')}"
            counts = f"{counted(one['files'], 'file')}, {counted(one['tensors'], 'tensor')}"
            click.echo(f"{one['name']}: {state} ({counts}, {size})")
        for problem in one["problems"]:
            click.echo(f"  {problem['error']}")
    if document["pointer"] is not None:
        click.echo(document["pointer"])
    for note in document["notes"]:
        click.echo(f"Note: {note}")

"""docs/fsdp-api.md has a row for everything in torch's FSDP, and a test for every row."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import fsdp

import shardrt.compat
from tests.fsdp_table import rows_of

ROOT = Path(__file__).parents[2]
FUNCTIONS = "functions"
NONE_TOO = ("BackwardPrefetch", "None")


def in_torch() -> set[tuple[str, str]]:
    """Every field, member, argument and method that torch's FSDP shows."""
    found: set[tuple[str, str]] = {NONE_TOO}
    for name in fsdp.__all__:
        thing = getattr(fsdp, name)
        if inspect.isclass(thing) and issubclass(thing, enum.Enum):
            found |= {(name, member) for member in thing.__members__}
        elif dataclasses.is_dataclass(thing):
            found |= {(name, field.name) for field in dataclasses.fields(thing)} or {(name, "(no field)")}
        elif inspect.isclass(thing):
            found |= {(name, shown) for shown in methods(thing)}
            if issubclass(thing, torch.nn.Module):
                found |= {(name, f"{argument}=") for argument in arguments(thing.__init__)}
        elif name == "fully_shard":
            found |= {(name, f"{argument}=") for argument in arguments(thing)}
        else:
            found.add((FUNCTIONS, f"{name}()"))
    return found


def methods(kind: type) -> set[str]:
    return {
        name if isinstance(value, property) else f"{name}()"
        for name, value in vars(kind).items()
        if not name.startswith("_") and (isinstance(value, property) or callable(getattr(kind, name)))
    }


def arguments(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_everything_in_torch_has_a_row_and_every_row_is_in_torch() -> None:
    rows = {(row.owner, row.field) for row in rows_of()}
    torch_has = in_torch()
    missing = sorted(torch_has - rows)
    assert not missing, (
        f"torch {torch.__version__} has these, and docs/fsdp-api.md does not: {missing}; give each its effect in "
        "shardrt.compat, or refuse it, then a row and a test"
    )
    assert not rows - torch_has, f"rows of docs/fsdp-api.md that torch {torch.__version__} has no field for"


def test_every_row_says_something_and_names_a_test_that_is_there() -> None:
    there = {
        f"{path.name}::{node.name}"
        for path in (ROOT / "tests" / "ranks").glob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    lost = sorted({row.test for row in rows_of()} - there)
    assert not lost, f"docs/fsdp-api.md names tests that are not there: {lost}"
    assert all(row.here for row in rows_of())


def test_no_row_stands_twice() -> None:
    rows = [(row.owner, row.field) for row in rows_of()]
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "FSDPModule", "UnshardHandle"])
def test_our_methods_take_what_torchs_take(name: str) -> None:
    theirs, ours = getattr(fsdp, name), getattr(shardrt.compat, name)
    for method in methods(theirs):
        called = method.removesuffix("()")
        if called == "wait":
            continue  # set on each handle
        assert hasattr(ours, called), f"{name}.{called} is in torch {torch.__version__} and not here"
        if method.endswith("()"):
            taken = inspect.signature(getattr(ours, called)).parameters
            wanted = [one for one in arguments(getattr(theirs, called)) if one not in ("args", "kwargs")]
            assert [one for one in wanted if one not in taken] == [], f"{name}.{called}"


def test_our_functions_take_what_torchs_take() -> None:
    assert arguments(shardrt.compat.fully_shard) == arguments(fsdp.fully_shard)
    assert arguments(shardrt.compat.FullyShardedDataParallel) == arguments(fsdp.FullyShardedDataParallel)
    for name in ("register_fsdp_forward_method", "share_comm_ctx"):
        assert arguments(getattr(shardrt.compat, name)) == arguments(getattr(fsdp, name))

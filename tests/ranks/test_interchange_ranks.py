"""What torch's own sharded runs save is read, and what is written they load, at other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardrt.interchange import read_dcp, read_torch, write_dcp, write_torch
from shardrt.testing import RankPool
from tests.doubles.states import same, whole
from tests.ranks.fsdp_runs import (
    LAYOUTS,
    Uneven,
    consolidate_zero,
    groups,
    leave_checkpoints,
    leave_grid,
    start_from,
    train,
)
from tests.ranks.twins import OPTIMIZERS, Odd, largest_difference

TOLERANCE = 1e-6
"""Three equal gradients added and divided by three are not always what they were."""


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that FSDP2 left on two ranks."""
    root = tmp_path_factory.mktemp("fsdp")
    for optimizer in ("adamw", "sgd"):
        (root / optimizer).mkdir()
        ranks.run(leave_checkpoints, ranks=2, timeout=120, directory=str(root / optimizer), optimizer=optimizer)
    return root


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def portable(path: Path) -> dict[str, Any]:
    """A run's whole state dicts as its file says, with groups in one order of options."""
    return comparable(whole(read_torch(path)))


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    optimizer = state["optimizers"]["optimizer"]
    return {
        "model": dict(sorted(state["models"]["model"].items())),
        "groups": [dict(sorted(group.items())) for group in optimizer["groups"]],
        "state": {name: dict(sorted(entry.items())) for name, entry in sorted(optimizer["state"].items())},
    }


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_fsdp2_saved_on_two_ranks_is_its_full_state_dict(runs: Path, layout: str, optimizer: str) -> None:
    state = read_dcp(runs / optimizer / layout)
    then = load(runs / optimizer / "then.pt")
    assert list(state.models["model"]) == list(then["model"])
    assert state.extra == {"epoch": 3}
    assert state.optimizers["optimizer"].step == (3 if optimizer == "adamw" else 0)
    assert same(comparable(whole(state)), portable(runs / optimizer / "then.pt"))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("layout", "optimizer"), [("nested", "adamw"), ("flattened", "sgd"), ("stateful", "adamw")])
def test_fsdp2_starts_from_what_is_written_and_trains_on(
    ranks: RankPool, runs: Path, world_size: int, layout: str, optimizer: str
) -> None:
    root, name = runs / optimizer, f"exported-{layout}-{world_size}"
    state = read_dcp(root / layout)
    write_dcp(state, root / name, prefix="app" if layout == "stateful" else "", flatten=layout == "flattened")
    epochs = ranks.run(
        start_from,
        ranks=world_size,
        timeout=120,
        directory=str(root),
        checkpoint=name,
        layout=layout,
        optimizer=optimizer,
    )
    assert epochs == [3] * world_size
    assert same(portable(root / f"{name}-then.pt"), portable(root / "then.pt"))
    ours, theirs = portable(root / f"{name}-later.pt"), portable(root / "later.pt")
    assert not same(theirs["model"], portable(root / "then.pt")["model"]), "the run must have gone on"
    if world_size == 2:
        assert same(ours, theirs)
    else:
        assert largest_difference(ours["model"].values(), theirs["model"].values()) <= TOLERANCE


def test_an_fsdp2_run_moves_into_a_plain_loop(runs: Path, tmp_path: Path) -> None:
    """From a directory through torch files into an unsharded model and optimizer, which train on alike."""
    write_torch(read_dcp(runs / "adamw" / "nested"), tmp_path / "m.pt", tmp_path / "o.pt")
    model = Uneven()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    model.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    optimizer.load_state_dict(torch.load(tmp_path / "o.pt", weights_only=True))
    train(model, optimizer, range(3, 6))
    later = load(runs / "adamw" / "later.pt")["model"]
    expected = [later[name] for name in model.state_dict()]
    assert largest_difference(model.state_dict().values(), expected) <= TOLERANCE


def test_tensors_that_are_cut_along_several_dims_are_put_together(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(leave_grid, ranks=4, timeout=120, directory=str(tmp_path))
    expected = load(tmp_path / "grid.pt")
    found = read_dcp(tmp_path / "grid").models["model"]
    assert same(whole(dict(found)), expected)
    for name, lazy in found.items():
        assert same(lazy.read(17, 80), expected[name].reshape(-1)[17:80]), name


@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adam", "adamw_fused", "adafactor", "lion_third_party"])
def test_the_consolidated_dict_of_torchs_zero_is_read(ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    ranks.run(consolidate_zero, ranks=2, timeout=120, directory=str(tmp_path), optimizer=optimizer)
    then = load(tmp_path / "zero.pt")
    state = read_torch(tmp_path / "zero.pt", names=then["names"])
    found = state.optimizers["optimizer"]
    raw = then["optimizer"]
    for number, name in enumerate(then["names"]):
        assert same(whole(dict(found.state.get(name, {}))), raw["state"].get(number, {})), name
    assert len(found.state) == len(raw["state"]) > 3

    write_torch(state, optimizer_path=tmp_path / "plain.pt")
    model = Odd(matrices_only=optimizer == "muon")
    cls, defaults = OPTIMIZERS[optimizer]
    plain = cls([param for param in model.parameters() if param.requires_grad], **defaults)
    plain.load_state_dict(torch.load(tmp_path / "plain.pt", weights_only=True))
    assert same(plain.state_dict()["state"], {key: raw["state"][key] for key in plain.state_dict()["state"]})

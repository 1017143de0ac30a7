"""Damage is found and named on every rank, costs nothing, and leaves earlier checkpoints usable."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import shardrt
from shardrt.checkpoint.manifest import seal, unseal
from shardrt.testing import RankPool
from tests.ranks.damaging import (
    FAULTS,
    build,
    load_into,
    reachable_directory,
    save_on_a_bad_disk,
    save_some,
    train_step,
    try_to_load,
)


@pytest.fixture(scope="module")
def checkpoints(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of two ranks; whoever damages them puts them right again."""
    path = tmp_path_factory.mktemp("run")
    ranks.run(save_some, ranks=2, path=str(path))
    return path


def sweep(path: Path, places: int, flips: int, seed: int = 0) -> dict[str, list[str]]:
    """Damage every file of the newest checkpoint, again and again, and load it alone: what was wrong, by file."""
    chance = random.Random(seed)
    wrong: dict[str, list[str]] = {}
    newest = sorted(path.glob("save-*"))[-1]
    with shardrt.Runtime(partitioner="flat") as rt:
        model, opt = build(rt, seed=1)
        train_step(model, opt)
        for file in [*sorted(newest.iterdir()), path / "latest.json"]:
            data = file.read_bytes()
            wrong[file.name] = []
            for number in range(places + flips):
                damaged = bytearray(data[: chance.randrange(len(data))] if number < places else data)
                if number >= places:
                    damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
                file.write_bytes(damaged)
                answer = load_into(rt, model, opt, str(path))
                text = answer["error"] or ""
                named = file.name in text and (file.name == "manifest.json" or "tensor '" in text)
                good = answer["step"] == 1 if file.name == "latest.json" and not text else named and answer["unchanged"]
                if not good:
                    wrong[file.name].append(f"case {number}: {answer}")
            file.write_bytes(data)
    return wrong


def test_every_cut_and_every_flipped_bit_is_found(checkpoints: Path) -> None:
    found = sweep(checkpoints, places=8, flips=24)
    assert len(found) == 4
    assert found == {name: [] for name in found}


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)


def reseal(file: Path, **changes: object) -> None:
    file.write_bytes(seal({**unseal(file.read_bytes(), where="here"), **changes}))


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "flipped": lambda new, old: flip(new / "rank-00001-of-00002.safetensors"),
    "missing": lambda new, old: (new / "rank-00001-of-00002.safetensors").unlink(),
    "extra": lambda new, old: (new / "rank-00002-of-00003.safetensors").write_bytes(b"x"),
    "mixed": lambda new, old: shutil.copy(
        old / "rank-00001-of-00002.safetensors", new / "rank-00001-of-00002.safetensors"
    ),
    "manifest": lambda new, old: flip(new / "manifest.json"),
    "version": lambda new, old: reseal(new / "manifest.json", version=2),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_rank_refuses_and_an_earlier_one_loads(
    ranks: RankPool, checkpoints: Path, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "run"
    shutil.copytree(checkpoints, path)
    old, new = sorted(path.glob("save-*"))
    DAMAGES[damage](new, old)
    for answer in ranks.run(try_to_load, ranks=2, path=str(path)):
        assert answer["error"] is not None and answer["unchanged"]
        assert new.name in answer["error"] or "rank-0000" in answer["error"]
    assert [answer["step"] for answer in ranks.run(try_to_load, ranks=2, path=str(path), step=1)] == [0, 0]
    assert [answer["step"] for answer in ranks.run(try_to_load, ranks=2, path=str(old))] == [0, 0]


def test_an_empty_directory_has_no_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    for answer in ranks.run(try_to_load, ranks=2, path=str(tmp_path)):
        assert "NoCheckpointError" in answer["error"] and answer["unchanged"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_that_fails_fails_on_every_rank_and_costs_nothing(
    ranks: RankPool, fault: str, asynchronous: bool
) -> None:
    culprit = 0 if fault.endswith(".json") or fault in ("read only", "full by fsspec") else 1
    with reachable_directory() as folder:
        answers = ranks.run(
            save_on_a_bad_disk, ranks=2, path=folder, fault=fault, asynchronous=asynchronous, culprit=culprit
        )
    for answer in answers:
        assert answer["told"], "nobody was told"
        for text in answer["told"]:
            named = "rank " if fault == "full by fsspec" else f"rank {culprit}"  # there each rank fails by itself
            assert text.startswith("CheckpointError") and named in text
            assert fault != "read only" or ("Permission denied" in text and "cannot list" not in text)
        assert (answer["old"], answer["new"]) == (1, 3)
    # The first rank removes what was begun, before it tells; the others may have been told already.
    assert [name for name in answers[0]["names"] if name.startswith("save-")] == ["save-000001-step-000001"]

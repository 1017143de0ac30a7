"""``shardrt ckpt verify`` finds every damage and goes on; ``diff`` finds every difference and says how large."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardrt.checkpoint.comparing import compare_states
from shardrt.checkpoint.manifest import Manifest
from shardrt.state.portable import LazyTensor, PortableOptimizer, PortableState
from tests.unit.ckpt_runs import document, run, save


@pytest.fixture(scope="module")
def resharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three ranks."""
    folder = tmp_path_factory.mktemp("ckpt")
    return Path(document("reshard", save(folder / "run"), folder / "out", "--ranks", 3)["path"])


@pytest.fixture
def copy(resharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(resharded, tmp_path / "copy"))


def files_of(checkpoint: Path) -> Any:
    return Manifest.from_bytes((checkpoint / "manifest.json").read_bytes(), where="manifest").files


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def problems(checkpoint: Path) -> list[tuple[str | None, str | None]]:
    told = document("verify", checkpoint, code=1)
    assert not told["ok"]
    return [(one["file"], one["tensor"]) for one in told["checkpoints"][0]["problems"]]


def test_each_damaged_tensor_is_named_and_no_other(copy: Path) -> None:
    expected = []
    for file in files_of(copy):
        for name, tensor in list(file.tensors.items())[:2]:
            if tensor.spec.nbytes:
                flip(copy / file.name, tensor.offset + tensor.spec.nbytes // 2)
                expected.append((file.name, name))
    assert len(expected) >= 5
    assert problems(copy) == expected
    shown = run("verify", copy)
    assert shown.exit_code == 1 and all(repr(name) in shown.stdout for _, name in expected)


def test_every_bit_of_small_files_counts(copy: Path) -> None:
    """One bit flipped, at many places of each file, headers and the manifest included."""
    for path in sorted(copy.iterdir()):
        size = path.stat().st_size
        for at in range(0, size, max(size // 12, 1)):
            flip(path, at)
            assert run("verify", copy).exit_code == 1, f"{path.name} at {at} of {size}"
            flip(path, at)
    assert run("verify", copy).exit_code == 0


def test_a_damaged_header_does_not_hide_a_damaged_tensor(copy: Path) -> None:
    file = files_of(copy)[1]
    name, tensor = next((n, t) for n, t in file.tensors.items() if t.spec.nbytes)
    flip(copy / file.name, 20)
    flip(copy / file.name, tensor.offset)
    assert problems(copy) == [(file.name, None), (file.name, name)]


def test_a_cut_file_names_what_is_cut(copy: Path) -> None:
    file = files_of(copy)[2]
    lost = [name for name, tensor in file.tensors.items() if tensor.spec.nbytes][-2:]
    path = copy / file.name
    path.write_bytes(path.read_bytes()[: file.tensors[lost[0]].offset])
    assert problems(copy) == [(file.name, None), (file.name, lost[0]), (file.name, lost[1])]


def test_missing_files_and_strays_are_told_together(copy: Path) -> None:
    one, _, other = files_of(copy)
    (copy / one.name).unlink()
    (copy / other.name).unlink()
    (copy / "rank-00000-of-00009.safetensors").write_bytes(b"")
    assert problems(copy) == [(None, None), (one.name, None), (other.name, None)]


def test_all_of_a_root_and_its_pointer(tmp_path: Path) -> None:
    root = tmp_path / "run"
    first, second = save(root, steps=1), save(root, steps=2)
    assert document("verify", root, "--all")["ok"]
    flip(first / "rank-00000-of-00001.safetensors", -1)
    assert document("verify", root)["ok"], "the latest one is fine"
    told = document("verify", root, "--all", code=1)
    assert [one["ok"] for one in told["checkpoints"]] == [False, True]
    flip(second / "manifest.json", 100)
    told = document("verify", root, "--all", code=1)
    assert [one["problems"][0]["file"] for one in told["checkpoints"]] == [
        "rank-00000-of-00001.safetensors",
        "manifest.json",
    ]
    shutil.rmtree(first)
    flip(second / "manifest.json", 100)
    flip(root / "latest.json", 12)
    told = document("verify", root, code=1)
    assert told["checkpoints"][0]["ok"] and "latest.json" in told["pointer"]


def test_differences_of_two_checkpoints(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a"), save(tmp_path / "b", steps=3, epoch=4, added=[1])
    told = document("diff", a, b, code=1)
    found = {one["name"]: one for one in told["differences"]}
    assert found["models/model/embed.weight"]["kind"] == "elements"
    assert found["models/model/embed.weight"]["elements"] == 2400
    assert 0 < found["models/model/embed.weight"]["max_abs"] < 0.1
    assert found["optimizers/optimizer/embed.weight/step"]["max_abs"] == 1.0
    assert found["optimizers/optimizer/step"]["a"] == "2"
    assert found["extra['epoch']"]["b"] == "4"
    assert found["extra['added'][0]"]["kind"] == "only in b"
    assert "models/model/frozen" not in found and "extra['mean']" not in found
    shown = run("diff", a, b, "--limit", 3)
    assert shown.exit_code == 1 and "of which 3 are shown" in shown.stdout
    assert run("diff", a, a).exit_code == 0


def state(tensor: torch.Tensor, lr: Any = 0.1) -> PortableState:
    one = PortableOptimizer(groups=({"lr": lr, "params": ["w"]},), state={"w": {"step": 3}}, kind="SGD")
    return PortableState(models={"model": {"w": LazyTensor.of(tensor)}}, optimizers={"optimizer": one})


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([math.nan, 2.0], [math.nan, 2.0], None),
        ([0.0, 2.0], [-0.0, 2.0], ("elements", 1, 0.0)),
        ([1.0, 2.0], [1.5, 0.0], ("elements", 2, 2.0)),
        ([math.inf, 2.0], [math.inf, 3.0], ("elements", 1, 1.0)),
        ([math.inf, 2.0], [1.0, 2.0], ("elements", 1, math.inf)),
        ([math.nan, 2.0], [1.0, 9.0], ("elements", 2, math.nan)),
        ([1, 2**62], [1, 0], ("elements", 1, 2.0**62)),
        ([True, False], [True, True], ("elements", 1, 1.0)),
        ([1.0 + 1j], [1.0 - 1j], ("elements", 1, 2.0)),
        ([1.0, 2.0], [[1.0, 2.0]], ("shape", None, None)),
        ([1.0, 2.0], [1, 3], ("dtype", 1, 1.0)),
        ([], [], None),
    ],
)
def test_how_much_tensors_differ(a: Any, b: Any, expected: tuple[str, int | None, float | None] | None) -> None:
    found = list(compare_states(state(torch.tensor(a)), state(torch.tensor(b))))
    if expected is None:
        assert found == []
        return
    [one] = found
    assert (one.kind, one.differing) == expected[:2]
    assert repr(one.max_abs) == repr(expected[2])
    assert one.to_json()["name"] == "models/model/w"


def test_windows_give_what_the_whole_would(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardrt.checkpoint import comparing

    a = torch.randn(1000)
    b = torch.where(torch.rand(1000) < 0.3, a + torch.randn(1000), a)
    [whole] = compare_states(state(a), state(b))
    monkeypatch.setattr(comparing, "WINDOW_BYTES", 64)
    [windowed] = compare_states(state(a), state(b))
    assert windowed == whole
    assert whole.differing == int((a != b).sum()) and whole.max_abs == float((a.double() - b.double()).abs().max())


def test_options_are_compared_by_type_and_value() -> None:
    ones = torch.ones(1)
    [one] = compare_states(state(ones, 1), state(ones, 1.0))
    assert (one.name, one.a, one.b) == ("optimizers/optimizer/groups[0]['lr']", "1", "1.0")
    assert list(compare_states(state(ones, math.nan), state(ones, math.nan))) == []

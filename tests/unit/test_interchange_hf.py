"""Hugging Face weights: what safetensors writes is read and the other way round; indexes are not believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model

from shardrt.errors import CheckpointError, NoCheckpointError, StateError
from shardrt.interchange import KINDS, detect, read_hf, write_dcp, write_hf
from shardrt.state.portable import LazyTensor, PortableState
from tests.doubles.safetensors_double import PlainSafetensors
from tests.doubles.states import same, small_state, whole

FORMAT = PlainSafetensors()


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = whole(dict(read_hf(path, format=FORMAT).models["model"]))
    return found


def of(tensors: dict[str, torch.Tensor]) -> PortableState:
    lazy = {name: LazyTensor.of(tensor) for name, tensor in tensors.items()}
    return PortableState(models={"model": lazy}, optimizers={})


def some_weights() -> dict[str, torch.Tensor]:
    return {
        "embed": torch.randn(10, 4),
        "half": torch.randn(7).to(torch.bfloat16),
        "count": torch.tensor(3),
        "mask": torch.tensor([True, False]),
        "nothing": torch.empty(0, 4),
        "odd": torch.tensor([float("nan"), float("-inf"), -0.0]),
    }


def sort(tensors: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(tensors.items()))


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    weights = some_weights()
    write_hf(of(weights), tmp_path, format=FORMAT)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert same(sort(load_file(tmp_path / "model.safetensors")), sort(weights))
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert same(sort(read(tmp_path)), sort(weights))
    assert same(sort(read(tmp_path / "model.safetensors")), sort(weights))


def test_what_safetensors_writes_is_read(tmp_path: Path) -> None:
    weights = some_weights()
    save_file(weights, tmp_path / "anything.safetensors")
    assert same(sort(read(tmp_path)), sort(weights))
    lazy = read_hf(tmp_path, format=FORMAT).models["model"]["embed"]
    assert same(lazy.read(5, 17), weights["embed"].reshape(-1)[5:17])


def test_shards_have_a_limit_and_an_index_like_the_hubs(tmp_path: Path) -> None:
    weights = {f"layer.{number}": torch.randn(10) for number in range(5)} | {"large": torch.randn(100)}
    write_hf(of(weights), tmp_path, max_shard_bytes=90, format=FORMAT)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 600}
    found: dict[str, torch.Tensor] = {}
    for file in files:
        held = load_file(tmp_path / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == set(held)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 90
        found |= held
    assert same(sort(found), sort(weights))
    assert same(sort(read(tmp_path)), sort(weights))


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("limit", [5e9, 1])
def test_ties_are_stored_once_and_come_back(tmp_path: Path, limit: float) -> None:
    tied = LazyTensor.of(torch.randn(5, 3))
    model = {"embed.weight": tied, "other": LazyTensor.of(torch.ones(2)), "head.weight": tied}
    write_hf(PortableState(models={"model": model}, optimizers={}), tmp_path, max_shard_bytes=limit, format=FORMAT)
    stored = [name for path in tmp_path.glob("*.safetensors") for name in load_file(path)]
    assert sorted(stored) == ["embed.weight", "other"]
    found = read_hf(tmp_path, format=FORMAT).models["model"]
    assert set(found) == set(model) and found["head.weight"] is found["embed.weight"]


def test_ties_are_told_as_safetensors_tells_them(tmp_path: Path) -> None:
    model = Tied()
    save_model(model, str(tmp_path / "theirs.safetensors"))
    found = read_hf(tmp_path / "theirs.safetensors", format=FORMAT).models["model"]
    assert set(found) == {"embed.weight", "head.weight"} and found["head.weight"] is found["embed.weight"]
    write_hf(read_hf(tmp_path, format=FORMAT), tmp_path / "ours", format=FORMAT)
    again = Tied()
    load_model(again, str(tmp_path / "ours" / "model.safetensors"))
    assert torch.equal(again.head.weight, model.head.weight)


def index(tmp_path: Path, content: Any) -> Path:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not json", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([1], "no 'weight_map'"),
        ({"weight_map": {"w": 3}}, "no 'weight_map'"),
        ({"weight_map": {"w": "/etc/passwd"}}, "'/etc/passwd', which is not inside"),
        ({"weight_map": {"w": "../a.safetensors"}}, "not inside of"),
        ({"weight_map": {"w": "b.safetensors"}}, "b.safetensors is not there"),
        ({"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}, "'v' is in a.safetensors, which does not have"),
        ({"weight_map": {}}, None),
    ],
)
def test_indexes_that_say_what_is_not_so_are_refused(tmp_path: Path, content: Any, said: str | None) -> None:
    path = index(tmp_path, content)
    if said is None:
        assert read(path) == {}
        return
    with pytest.raises(CheckpointError, match=said):
        read(path)


def test_tensors_that_the_index_does_not_list_are_noticed(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2), "v": torch.ones(2)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"does not list v, which b\.safetensors has"):
        read(index(tmp_path, {"weight_map": {"w": "b.safetensors"}}))


def test_what_cannot_be_told_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="neither a file nor a directory"):
        read(tmp_path / "nowhere")
    with pytest.raises(NoCheckpointError, match="and 0 other"):
        read(tmp_path)
    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(NoCheckpointError, match=r"2 other \.safetensors files: cannot tell"):
        read(tmp_path)
    (tmp_path / "c.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"c\.safetensors is empty"):
        read(tmp_path / "c.safetensors")
    (tmp_path / "d.safetensors").write_bytes((10**12).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=r"d\.safetensors: the header has 1000000000000 bytes"):
        read(tmp_path / "d.safetensors")
    save_file({"w": torch.ones(2)}, tmp_path / "e.safetensors", {"DCP_SHARDING_INFO": "{}"})
    with pytest.raises(CheckpointError, match="holds shards of tensors"):
        read(tmp_path / "e.safetensors")


def test_a_layout_that_leaves_the_file_is_refused_whoever_read_it(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes().replace(b'"shape":[2]', b'"shape":[9]')
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="'w' leaves the file"):
        read(tmp_path)


def test_writing_refuses_what_has_no_place(tmp_path: Path) -> None:
    write_hf(small_state(), tmp_path / "out", format=FORMAT)
    with pytest.raises(CheckpointError, match=r"has weights already: model\.safetensors"):
        write_hf(small_state(), tmp_path / "out", format=FORMAT)
    with pytest.raises(CheckpointError, match="is a file"):
        write_hf(small_state(), tmp_path / "out" / "model.safetensors", format=FORMAT)
    with pytest.raises(StateError, match="at least 1"):
        write_hf(small_state(), tmp_path / "new", max_shard_bytes=0, format=FORMAT)
    with pytest.raises(StateError, match="room for one model"):
        write_hf(PortableState(models={}, optimizers={}), tmp_path / "new", format=FORMAT)
    assert not (tmp_path / "new").exists()


def test_a_failed_write_leaves_no_weights(tmp_path: Path) -> None:
    def fail(start: int, stop: int) -> torch.Tensor:
        raise CheckpointError("the source broke")

    broken = LazyTensor(dtype="float32", shape=(4,), read=fail)
    state = PortableState(models={"model": {"a": LazyTensor.of(torch.ones(2)), "b": broken}}, optimizers={})
    with pytest.raises(CheckpointError, match="the source broke"):
        write_hf(state, tmp_path, max_shard_bytes=8, format=FORMAT)
    assert list(tmp_path.iterdir()) == []


def test_detect_tells_what_a_path_is(tmp_path: Path) -> None:
    weights = {"w": torch.ones(200)}
    torch.save(weights, tmp_path / "new.pt")
    torch.save(weights, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "new.pt").read_bytes()[:900])
    save_file(weights, tmp_path / "w.safetensors")
    (tmp_path / "renamed").write_bytes((tmp_path / "w.safetensors").read_bytes())
    write_hf(of(weights), tmp_path / "hub", max_shard_bytes=1, format=FORMAT)
    write_dcp(of(weights), tmp_path / "run")
    found = {path.name: detect(path) for path in tmp_path.iterdir()}
    assert found == {
        "new.pt": "torch",
        "old.pt": "torch",
        "cut.pt": "torch",
        "w.safetensors": "hf",
        "renamed": "hf",
        "hub": "hf",
        "run": "dcp",
    }
    assert set(found.values()) == set(KINDS)


def test_detect_lists_what_is_understood(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    import zipfile

    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("x", "y")
    for name in ("notes.txt", "empty", "other.zip"):
        with pytest.raises(CheckpointError, match=r"Understood are torch: .*; dcp: .*; hf: ") as caught:
            detect(tmp_path / name)
        assert name in str(caught.value)
    with pytest.raises(NoCheckpointError, match="neither a file nor"):
        detect(tmp_path / "nowhere")

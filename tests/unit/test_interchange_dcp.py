"""Directories of torch.distributed.checkpoint: what torch writes is read, what it reads is written, harm is refused."""

from __future__ import annotations

import dataclasses
import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from shardrt.errors import CheckpointError, NoCheckpointError, ShardrtError, StateError
from shardrt.interchange import read_dcp, write_dcp
from shardrt.state.portable import PortableState
from tests.doubles.states import Canary, same, small_state, whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def save(tree: dict[str, Any], path: Path) -> Path:
    dcp.save(tree, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("prefix", ["", "app"])
def test_a_state_comes_back_bit_for_bit(tmp_path: Path, prefix: str, flatten: bool) -> None:
    state = small_state()
    write_dcp(state, tmp_path / "run", prefix=prefix, flatten=flatten)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert not [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".shardrt")]
    assert same(whole(read_dcp(tmp_path / "run")), whole(state))


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    state = small_state()
    write_dcp(state, tmp_path / "run")
    expected = whole(dict(state.models["model"]))
    into = {"model": {name: torch.zeros_like(tensor) for name, tensor in expected.items()}, "extra": {"epoch": 0}}
    dcp.load(into, checkpoint_id=tmp_path / "run", no_dist=True)
    assert same(into, {"model": expected, "extra": {"epoch": 3}})


def test_every_dtype_and_stride_is_read(tmp_path: Path) -> None:
    tensors = {
        str(dtype): torch.arange(6).reshape(2, 3).to(dtype)
        for dtype in (
            *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
            *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
            *(torch.complex64, torch.complex128),
        )
    }
    tensors["transposed"] = torch.randn(5, 6).t()
    tensors["last"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensors["sliced"] = torch.arange(100)[7:93:3]
    tensors["parameter"] = torch.nn.Parameter(torch.randn(3))
    tensors["scalar"] = torch.tensor(2.5)
    tensors["nothing"] = torch.empty(0, 3)
    found = read_dcp(save({"model": tensors}, tmp_path / "run")).models["model"]
    for name, tensor in tensors.items():
        assert same(found[name].whole(), tensor.detach()), name


@pytest.mark.parametrize("many", [False, True])
def test_one_file_or_many(tmp_path: Path, many: bool) -> None:
    weights = {"a": torch.randn(3), "b": torch.randn(4, 4)}
    writer = dcp.FileSystemWriter(tmp_path / "run", single_file_per_rank=not many, thread_count=2)
    dcp.save({"model": weights}, storage_writer=writer, no_dist=True)
    assert same(whole(dict(read_dcp(tmp_path / "run").models["model"])), weights)


WEIGHTS = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)}


def optimizer_dict() -> dict[str, Any]:
    return {
        "state": {"w": {"exp_avg": torch.ones(2, 3), "step": torch.tensor(2.0)}},
        "param_groups": [{"lr": torch.tensor(0.5), "betas": (0.9, 0.99), "params": ["w", "b"]}],
    }


@pytest.mark.parametrize(
    "tree",
    [
        {"model": WEIGHTS, "optim": optimizer_dict()},
        {"model": WEIGHTS, "optimizer": optimizer_dict(), "epoch": 3},
        {"app": {"model": WEIGHTS, "optim": optimizer_dict(), "extra": {"seen": torch.ones(2)}}},
        {"net": WEIGHTS, "sgd": optimizer_dict(), "extra": {"list": [1, {"x": torch.ones(2)}]}},
        {"state_dict": WEIGHTS, "ema": WEIGHTS, "optim": optimizer_dict()},
        {"model": {f"module.{name}": value for name, value in WEIGHTS.items()}, "optim": optimizer_dict()},
    ],
)
def test_the_model_and_the_optimizer_are_found(tmp_path: Path, tree: dict[str, Any]) -> None:
    state = read_dcp(save(tree, tmp_path / "run"))
    assert same(whole(dict(state.models["model"])), WEIGHTS)
    found = state.optimizers["optimizer"]
    assert found.step == 2
    [group] = found.groups
    assert same(dict(group), {"lr": torch.tensor(0.5), "betas": (0.9, 0.99), "params": ["w", "b"]})
    assert same(whole(dict(found.state)), optimizer_dict()["state"])


def test_extra_is_what_else_there_is(tmp_path: Path) -> None:
    extra = {"list": [1, {"x": torch.ones(2)}], "none": None, "pair": (1, 2.5)}
    assert same(read_dcp(save({"model": WEIGHTS, "extra": extra}, tmp_path / "a")).extra, extra)
    assert same(read_dcp(save({"model": WEIGHTS, **extra}, tmp_path / "b")).extra, extra)
    assert same(read_dcp(save({"app": {"model": WEIGHTS, "epoch": 3}}, tmp_path / "c")).extra, {"epoch": 3})
    assert read_dcp(tmp_path / "a", extra=False).extra is None


def test_a_bare_model_and_a_numbered_optimizer_are_read(tmp_path: Path) -> None:
    assert same(whole(dict(read_dcp(save(dict(WEIGHTS), tmp_path / "a")).models["model"])), WEIGHTS)
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(3)).sum().backward()
    optimizer.step()
    save({"model": layer.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "b")
    found = read_dcp(tmp_path / "b").optimizers["optimizer"]
    assert list(found.state) == ["weight", "bias"] and found.groups[0]["params"] == ["weight", "bias"]
    save({"optim": optimizer.state_dict()}, tmp_path / "c")
    with pytest.raises(StateError, match="pass names="):
        read_dcp(tmp_path / "c")
    assert list(read_dcp(tmp_path / "c", names=["x", "y"]).optimizers["optimizer"].state) == ["x", "y"]


def test_an_optimizer_without_state_is_read(tmp_path: Path) -> None:
    raw = {"state": {}, "param_groups": [{"lr": 0.5, "params": ["w", "b"]}]}
    found = read_dcp(save({"model": WEIGHTS, "optim": raw}, tmp_path / "a")).optimizers["optimizer"]
    assert found.state == {} and found.groups == ({"lr": 0.5, "params": ["w", "b"]},)


def test_what_may_be_several_things_is_asked_for(tmp_path: Path) -> None:
    path = save(
        {"gen": WEIGHTS, "disc": {"v": torch.ones(1)}, "a": optimizer_dict(), "b": optimizer_dict()}, tmp_path / "r"
    )
    with pytest.raises(CheckpointError, match=r"several things that may be the optimizer: 'a', 'b'.*optimizer='a'"):
        read_dcp(path)
    with pytest.raises(CheckpointError, match=r"several things that may be the model: 'gen', 'disc'"):
        read_dcp(path, optimizer="a")
    with pytest.raises(CheckpointError, match="no model at 'x'; there is 'gen', 'disc'"):
        read_dcp(path, optimizer="a", model="x")
    assert list(read_dcp(path, optimizer="a", model="gen", extra=False).models["model"]) == ["w", "b"]


def test_what_is_not_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match=r"has no \.metadata"):
        read_dcp(tmp_path)
    (tmp_path / "__0.metadata").write_bytes(b"")
    with pytest.raises(NoCheckpointError, match="each rank for itself"):
        read_dcp(tmp_path)
    writer = dcp.FileSystemWriter(tmp_path / "st", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"model": WEIGHTS}, storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointError, match=r"SerializationFormat\.SAFETENSORS"):
        read_dcp(tmp_path / "st")


def test_writing_refuses_what_has_no_place(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="there exists"):
        write_dcp(small_state(), tmp_path / "there")
    model = small_state().models["model"]
    with pytest.raises(StateError, match="called 'extra'"):
        write_dcp(PortableState(models={"extra": model}, optimizers={}, extra=1), tmp_path / "run")
    optimizer = attrs.evolve(small_state().optimizers["optimizer"], groups=())
    with pytest.raises(StateError, match="which no parameter group lists"):
        write_dcp(PortableState(models={}, optimizers={"optimizer": optimizer}), tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


Change = Callable[[Metadata], None]


def restore(metadata: Metadata, **fields: Any) -> None:
    """Change where the weight w is said to be."""
    [index] = [each for each in metadata.storage_data if each.fqn == "model.w"]
    metadata.storage_data[index] = dataclasses.replace(metadata.storage_data[index], **fields)


def chunked(
    metadata: Metadata, *chunks: tuple[tuple[int, ...], tuple[int, ...]], size: tuple[int, ...] = (2, 3)
) -> None:
    entry = metadata.state_dict_metadata["model.w"]
    entry.chunks = [ChunkStorageMetadata(offsets=torch.Size(o), sizes=tuple(s)) for o, s in chunks]  # type: ignore[union-attr,arg-type]
    entry.size = tuple(size)  # type: ignore[union-attr,assignment]
    [(index, info)] = [(index, info) for index, info in metadata.storage_data.items() if index.fqn == "model.w"]
    del metadata.storage_data[index]
    for offsets, _ in chunks:
        metadata.storage_data[MetadataIndex("model.w", offsets)] = info


CHANGES: dict[str, tuple[Change, str]] = {
    "absolute": (lambda m: restore(m, relative_path="/etc/passwd"), "'/etc/passwd', which is not inside"),
    "above": (lambda m: restore(m, relative_path="../run2/__0_0.distcp"), "not inside of"),
    "deep above": (lambda m: restore(m, relative_path="x/../../y"), "not inside of"),
    "nul": (lambda m: restore(m, relative_path="a\0b"), "not inside of"),
    "no name": (lambda m: restore(m, relative_path=""), "not inside of"),
    "name is a number": (lambda m: restore(m, relative_path=7), "holds 7 where a text is expected"),
    "missing file": (lambda m: restore(m, relative_path="__9_0.distcp"), "No such file"),
    "negative offset": (lambda m: restore(m, offset=-1), "said to be at -1"),
    "negative length": (lambda m: restore(m, length=-8), "a length of -8"),
    "outside": (lambda m: restore(m, offset=10**6), r"which has \d+ bytes"),
    "too long": (lambda m: restore(m, length=10**13), r"which has \d+ bytes"),
    "huge number": (lambda m: restore(m, length=10**5000), "a number of"),
    "a flag": (lambda m: restore(m, length=True), "a length of True"),
    "elsewhere": (lambda m: restore(m, offset=0, length=10), "overlap in|archive of 10 bytes"),
    "transform": (lambda m: restore(m, transform_descriptors=["zstd"]), "stored through a transform"),
    "terabytes": (lambda m: chunked(m, ((0, 0), (2**40, 3)), size=(2**40, 3)), r"claims a chunk of \d+ x float32"),
    "missing chunk": (lambda m: chunked(m, ((0, 0), (1, 3))), "3 elements of 6"),
    "no chunk": (lambda m: chunked(m), "0 elements of 6"),
    "overlapping": (lambda m: chunked(m, ((0, 0), (2, 3)), ((1, 0), (1, 3))), "overlap"),
    "leaving": (lambda m: chunked(m, ((0, 0), (3, 3))), "leaves the tensor"),
    "negative size": (lambda m: chunked(m, ((0, 0), (-2, 3))), "sizes from 0 up"),
    "other sizes": (lambda m: chunked(m, ((0, 0), (3, 2)), size=(3, 2)), r"holds a tensor float32 \(2, 3\), but"),
    "shared bytes": (lambda m: chunked(m, ((0, 0), (1, 3)), ((1, 0), (1, 3))), "overlap in"),
    "not stored": (lambda m: m.storage_data.clear(), "not stored in any file"),
    "no storage": (lambda m: setattr(m, "storage_data", None), "where a dict"),
    "no tensors": (lambda m: setattr(m, "state_dict_metadata", [1]), "holds a list where a dict"),
    "odd entry": (lambda m: m.state_dict_metadata.update({"model.w": 3}), "holds 3 where"),  # type: ignore[dict-item]
    "odd path": (lambda m: m.planner_data.update({"model.w": ([],)}), "as its path"),
    "long path": (lambda m: m.planner_data.update({"model.w": ("a",) * 99}), "as its path"),
    "same path": (lambda m: m.planner_data.update({"model.w": m.planner_data["model.b"]}), "the same path"),
    "odd dtype": (
        lambda m: setattr(m.state_dict_metadata["model.w"].properties, "dtype", 3),  # type: ignore[union-attr]
        "has 3 as its dtype",
    ),
    "unknown dtype": (
        lambda m: setattr(m.state_dict_metadata["model.w"].properties, "dtype", torch.uint16),  # type: ignore[union-attr]
        "the name 'torch.uint16' as its dtype",
    ),
    "other dtype": (
        lambda m: setattr(m.state_dict_metadata["model.w"].properties, "dtype", torch.int32),  # type: ignore[union-attr]
        "holds a tensor float32",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_metadata_that_says_what_is_not_so_is_refused(tmp_path: Path, change: str) -> None:
    path = save({"model": WEIGHTS}, tmp_path / "run")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    alter, said = CHANGES[change]
    alter(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=said):
        read_dcp(path).models["model"]["w"].whole()


def test_metadata_that_would_run_code_is_refused_and_does_not(tmp_path: Path) -> None:
    path, ran = save({"model": WEIGHTS}, tmp_path / "run"), tmp_path / "ran"
    honest = pickle.loads((path / ".metadata").read_bytes())
    within = dataclasses.replace(honest, state_dict_metadata={"model.w": Canary(ran)})
    for data in (pickle.dumps(Canary(ran)), pickle.dumps(Canary(ran), 2), pickle.dumps(within)):
        (path / ".metadata").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"made by 'posix\.mkdir' where .* nothing in it was run"):
            read_dcp(path)
    # Where nobody looks it is not even noticed, and does not run either.
    honest.storage_meta = Canary(ran)
    (path / ".metadata").write_bytes(pickle.dumps(honest))
    assert same(whole(dict(read_dcp(path).models["model"])), WEIGHTS)
    assert not ran.exists()


def replace_item(path: Path, key: str, data: bytes) -> None:
    """Put these bytes into a file of their own, as the item of an entry."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    [index] = [each for each in metadata.storage_data if each.fqn == key]
    (path / f"{key}.distcp").write_bytes(data)
    info = metadata.storage_data[index]
    metadata.storage_data[index] = dataclasses.replace(info, relative_path=f"{key}.distcp", offset=0, length=len(data))
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def saved(value: Any) -> bytes:
    stored = io.BytesIO()
    torch.save(value, stored)
    return stored.getvalue()


def test_items_that_would_run_code_are_refused_and_do_not(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for number, data in enumerate((saved(Canary(ran)), pickle.dumps(Canary(ran)) * 2)):
        path = save({"model": WEIGHTS, "epoch": 3}, tmp_path / f"run{number}")
        replace_item(path, "model.w", data)
        with pytest.raises(CheckpointError, match=r"nothing was run|not an archive|in an archive of"):
            read_dcp(path).models["model"]["w"].whole()
        replace_item(path, "epoch", data)
        with pytest.raises(CheckpointError, match="'epoch' is not a file of tensors and plain values"):
            read_dcp(path)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"w": torch.ones(2, 3)}, "holds a dict where a dense tensor"),
        (torch.ones(2, 3).to_sparse(), "where a dense tensor is expected"),
        (torch.ones(3, 2), r"holds a tensor float32 \(3, 2\), but the metadata says float32 \(2, 3\)"),
        (torch.ones(2, 3, dtype=torch.float64), "holds a tensor float64"),
    ],
)
def test_items_that_are_something_else_are_refused(tmp_path: Path, value: Any, said: str) -> None:
    path = save({"model": WEIGHTS}, tmp_path / "run")
    replace_item(path, "model.w", saved(value))
    with pytest.raises(CheckpointError, match=said):
        read_dcp(path).models["model"]["w"].whole()


def test_damage_anywhere_is_an_error_of_ours_or_other_values(tmp_path: Path) -> None:
    """Bytes changed one by one, and files cut off at many places, end in an error of ours; nothing else."""
    path = save({"model": {"w": WEIGHTS["w"]}}, tmp_path / "run")
    refused = 0
    for name in (".metadata", "__0_0.distcp"):
        data = (path / name).read_bytes()
        damaged = [data[:length] for length in range(0, len(data), 23)]
        damaged += [data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :] for at in range(0, len(data), 7)]
        for each in damaged:
            (path / name).write_bytes(each)
            try:
                read_dcp(path).models["model"]["w"].whole()
            except ShardrtError:
                refused += 1
            except KeyError as error:
                assert error.args[0] in ("model", "w"), "the name itself was hit"
        (path / name).write_bytes(data)
    assert refused > 100
    shutil.rmtree(path)

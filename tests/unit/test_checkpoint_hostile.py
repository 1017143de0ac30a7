"""Files that somebody wrote to do harm: refused with an error of ours, and nothing in them runs."""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardrt
from shardrt.checkpoint.manifest import Manifest, seal, unseal
from shardrt.errors import CheckpointError, ShardrtError
from shardrt.state.tree import unpack
from tests.ranks.damaging import build, load_into, train_step

Found = tuple[shardrt.Runtime, torch.nn.Module, Any, Path, Path]


class Canary:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """A run, its checkpoint, and the checkpoint's directory."""
    path = tmp_path_factory.mktemp("run")
    with shardrt.Runtime() as rt:
        model, opt = build(rt)
        train_step(model, opt)
        rt.save(path, model=model, optimizer=opt, extra={"step": 1, "list": [1, (2.5, {"a": b"x"})]})
        [directory] = path.glob("save-*")
        yield rt, model, opt, path, directory


def refused(found: Found) -> str:
    """The error of loading it, and nothing has changed."""
    rt, model, opt, path, _ = found
    answer = load_into(rt, model, opt, str(path))
    assert answer["error"] is not None
    assert answer["unchanged"]
    return str(answer["error"])


class Replaced:
    """A file that is another one for a while."""

    def __init__(self, path: Path, data: bytes) -> None:
        self._path, self._data, self._before = path, data, path.read_bytes()

    def __enter__(self) -> None:
        self._path.write_bytes(self._data)

    def __exit__(self, *_: object) -> None:
        self._path.write_bytes(self._before)


def test_a_pickle_is_never_run(saved: Found, tmp_path: Path) -> None:
    canary = tmp_path / "sang"
    data = pickle.dumps(Canary(canary))
    shard = next(saved[4].glob("rank-*"))
    with Replaced(saved[4] / "manifest.json", data):
        assert "manifest.json" in refused(saved)
    with Replaced(shard, data):
        assert shard.name in refused(saved)
    with Replaced(shard, data.ljust(shard.stat().st_size, b"\0")):
        assert shard.name in refused(saved)
    with Replaced(saved[3] / "latest.json", data):
        assert load_into(*saved[:3], str(saved[3]))["step"] == 1
    assert not canary.exists()
    pickle.loads(data)
    assert canary.exists(), "the canary itself works"


def forged(found: Found, change: Any) -> bytes:
    document = unseal((found[4] / "manifest.json").read_bytes(), where="here")
    change(document)
    return seal(document)


def first_row(document: dict[str, Any]) -> list[Any]:
    return next(iter(document["files"][0]["tensors"].values()))


def first_pieces(document: dict[str, Any]) -> list[Any]:
    return list(next(iter(document["models"]["model"]["tensors"].values())))[2]


FORGERIES: dict[str, tuple[Any, str]] = {
    "leaves the directory": (lambda d: d["files"][0].update(name="../secret"), "plain name"),
    "absolute": (lambda d: d["files"][0].update(name="/etc/passwd"), "plain name"),
    "negative offset": (lambda d: first_row(d).__setitem__(2, -8), "overlap or leave"),
    "overlap": (lambda d: first_row(d).__setitem__(2, 0), "overlap or leave"),
    "terabytes": (lambda d: first_row(d).__setitem__(1, [2**50]), "overlap or leave"),
    "beyond numbers": (lambda d: first_row(d).__setitem__(1, [10**4000] * 60), "not a list of sizes"),
    "beyond files": (lambda d: first_row(d).__setitem__(1, [2**40] * 3), "larger than any file"),
    "nothing, of endless strides": (lambda d: first_row(d).__setitem__(1, [2**60, 2**60, 0]), "larger than any file"),
    "large file": (lambda d: d["files"][0].update(size=2**50), "its tensors end at"),
    "negative piece": (lambda d: first_pieces(d)[0].__setitem__(2, -1), "has the numbers"),
    "piece too long": (lambda d: first_pieces(d)[0].__setitem__(3, 2**40), "is not elements"),
    "gap": (lambda d: first_pieces(d).clear(), "end at element 0"),
    "no such file": (lambda d: first_pieces(d)[0].__setitem__(0, 7), "there are 1 files"),
    "alias of a list": (lambda d: d["models"]["model"]["aliases"].update(x=["first.weight"]), "another name of"),
    "too many random states": (lambda d: d["random"].append({}), "random states of 2 ranks"),
    "too many ranks": (lambda d: d.update(world_size=2), "each rank has one"),
    "another version": (lambda d: d.update(version=99), "version 99"),
    "another format": (lambda d: d.update(format="pickle"), "of format 'pickle'"),
    "unknown state format": (lambda d: d.update(state_format="pickle"), "pickle"),
    "unknown mark": (lambda d: d.update(extra={"$": "call", "name": "os.system"}), "does not know"),
    "deep nesting": (lambda d: d.update(extra=nested(500)), "nested"),
    "deep inside a mark": (lambda d: d.update(extra={"$": "float", "value": nested(500)}), "cannot be read"),
    "a tensor of nowhere": (lambda d: d.update(extra={"$": "tensor", "name": "../x"}), "has no tensor"),
    "an expression for a dtype": (
        lambda d: d.update(extra={"$": "numpy", "dtype": "(2,)f8,(", "value": 1}),
        "no plain number",
    ),
    "an array of no size": (
        lambda d: d.update(
            extra={"$": "array", "dtype": "<f4", "shape": [10**30], "name": next(iter(d["files"][0]["tensors"]))}
        ),
        "cannot be read",
    ),
    "options that are a list": (lambda d: d["optimizers"]["optimizer"]["groups"][0].__setitem__(0, []), "mapping"),
    "options with parameters": (
        lambda d: d["optimizers"]["optimizer"]["groups"][0][0].update(params=[]),
        "'params'",
    ),
    "a text for a learning rate": (
        lambda d: d["optimizers"]["optimizer"]["groups"][0][0].update(lr="fast"),
        "'lr'",
    ),
    "random states of nothing": (lambda d: d["random"].__setitem__(0, {}), "random states"),
    "extra state that is a number": (lambda d: d["models"]["model"].update(values=3), "mapping"),
}


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("case", FORGERIES)
def test_a_sealed_manifest_that_lies_is_refused(saved: Found, case: str) -> None:
    change, words = FORGERIES[case]
    with Replaced(saved[4] / "manifest.json", forged(saved, change)):
        error = refused(saved)
    assert words in error
    assert saved[4].name in error


def test_a_header_that_claims_terabytes_is_refused(saved: Found) -> None:
    [shard] = saved[4].glob("rank-*")
    data = shard.read_bytes()
    for length in (2**43, len(data), 0):
        with Replaced(shard, length.to_bytes(8, "little") + data[8:]):
            error = refused(saved)
            assert shard.name in error and "tensor 'model/" in error


def test_a_manifest_of_a_terabyte_is_not_read(saved: Found) -> None:
    manifest = saved[4] / "manifest.json"
    before = manifest.read_bytes()
    os.truncate(manifest, 2**40)
    try:
        assert "is the most" in refused(saved)
    finally:
        manifest.write_bytes(before)


@pytest.mark.parametrize(
    "note", [b"{", b"[]", b'{"host": 1}', b"[" * 5000, b'{"pid": 1e999}', json.dumps({"pid": 2**80}).encode()]
)
def test_whatever_a_leftover_says_of_its_writer_saving_goes_on(tmp_path: Path, note: bytes) -> None:
    leftover = tmp_path / "save-000004-step-000009"
    leftover.mkdir()
    (leftover / "writing.json").write_bytes(note)
    with shardrt.Runtime() as rt:
        rt.save(tmp_path, extra={"a": 1})
        assert rt.load(tmp_path) == {"a": 1}
    assert not leftover.exists()


def test_a_pointer_that_leads_elsewhere_is_ignored(saved: Found) -> None:
    for latest in ("../elsewhere", "save-" + "9" * 5000 + "-step-000001", ["x"], 3, "save-000009-step-000009"):
        with Replaced(saved[3] / "latest.json", seal({"latest": latest})):
            assert load_into(*saved[:3], str(saved[3]))["step"] == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.just("$"), inner, max_size=4),
    max_leaves=8,
)
MARKS = ("tensor", "float", "complex", "bytes", "dtype", "device", "numpy", "array", "dict", "Counter", "tuple", "Size")
KEYS = ("name", "value", "parts", "base64", "dtype", "shape", "items")
TREES = JSON | st.fixed_dictionaries(
    {"$": st.sampled_from(MARKS)}, optional={key: JSON | st.sampled_from(["t", "<f4", "cpu"]) for key in KEYS}
)


@given(TREES | st.lists(TREES, max_size=3))
@settings(max_examples=200)
def test_a_tree_is_read_or_refused(tree: Any) -> None:
    try:
        unpack(tree, {"t": torch.ones(2)}.__getitem__, where="here")
    except ShardrtError as error:
        assert "here" in str(error)


@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="here"):
        Manifest.from_bytes(data, where="here")


def paths_of(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of a document are."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield (*path, key)
        yield from paths_of(value, (*path, key))


@given(data=st.data())
@settings(max_examples=60)
def test_a_manifest_changed_anywhere_is_read_or_refused(saved: Found, data: st.DataObject) -> None:
    document = copy.deepcopy(unseal((saved[4] / "manifest.json").read_bytes(), where="here"))
    path = data.draw(st.sampled_from(list(paths_of(document))))
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    if isinstance(holder, dict) and data.draw(st.booleans()):
        del holder[path[-1]]
    else:
        holder[path[-1]] = data.draw(TREES | st.sampled_from([-1, 2**40, 10**300, "../x", [], {}, True]))
    rt, model, opt, root, directory = saved
    try:
        sealed = seal(document)
    except ValueError:  # NaN is no JSON
        return
    with Replaced(directory / "manifest.json", sealed):
        before = [copy.deepcopy(group) for group in opt.param_groups]
        answer = load_into(rt, model, opt, str(root))  # any error that is not ours fails here
    if answer["error"] is not None:
        assert answer["unchanged"]
    for group, was in zip(opt.param_groups, before, strict=True):
        group.update({key: value for key, value in was.items() if key != "params"})

"""Files of torch.save: round trips bit for bit, the shapes such files come in, names, and files that mean harm."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from shardrt.errors import CheckpointError, ShardrtError, StateError
from shardrt.interchange import read_dcp, read_torch, write_dcp, write_torch
from shardrt.state.portable import PortableOptimizer, PortableState
from tests.doubles.states import Canary, same, small_state, whole
from tests.ranks.twins import OPTIMIZERS, Odd, batch


def trained(name: str, steps: int = 3, *, named: bool = False) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    cls, defaults = OPTIMIZERS[name]
    model = Odd(matrices_only=name == "muon")
    params: Any = model.named_parameters() if named else model.parameters()
    optimizer = cls(params, **defaults)
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model(batch(step, 0)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dicts_come_back_bit_for_bit_and_train_on(tmp_path: Path, name: str, named: bool) -> None:
    model, optimizer = trained(name, named=named)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    state = read_torch(tmp_path / "model.pt", tmp_path / "optimizer.pt")
    write_torch(state, tmp_path / "model2.pt", tmp_path / "optimizer2.pt", named=named)
    weights = torch.load(tmp_path / "model2.pt", weights_only=True)
    moments = torch.load(tmp_path / "optimizer2.pt", weights_only=True)
    assert same(dict(model.state_dict()), weights)
    expected = optimizer.state_dict()
    for group, other in zip(expected["param_groups"], moments["param_groups"], strict=True):
        assert set(group) == set(other)
    expected["param_groups"] = [  # torch puts the names elsewhere: the order of options is not meant
        {key: group[key] for key in other}
        for group, other in zip(expected["param_groups"], moments["param_groups"], strict=True)
    ]
    assert same(expected, moments)

    torch.manual_seed(4)
    twin, its_optimizer = trained(name, steps=0, named=named)
    twin.load_state_dict(weights)
    its_optimizer.load_state_dict(moments)
    train(model, optimizer, range(3, 6))
    train(twin, its_optimizer, range(3, 6))
    assert same(dict(model.state_dict()), dict(twin.state_dict()))


def test_ties_are_kept(tmp_path: Path) -> None:
    model, _ = trained("adam")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    found = read_torch(tmp_path / "model.pt").models["model"]
    assert found["tied.weight"] is found["inner.weight"]
    write_torch(read_torch(tmp_path / "model.pt"), tmp_path / "again.pt")
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert again["tied.weight"].data_ptr() == again["inner.weight"].data_ptr()


def test_every_dtype_bit_pattern_and_stride_comes_back(tmp_path: Path) -> None:
    state = small_state()
    write_torch(state, tmp_path / "m.pt", tmp_path / "o.pt")
    assert same(whole(read_torch(tmp_path / "m.pt", tmp_path / "o.pt")), whole(attrs.evolve(state, extra=None)))
    odd = {
        "transposed": torch.randn(5, 6).t(),
        "brain": torch.randn(4, 5).to(torch.bfloat16).t(),
        "complex": torch.randn(3, 3, dtype=torch.complex64).t(),
        "wide": torch.randn(3, 2, dtype=torch.complex128).t(),
        "flags": (torch.rand(3, 2) > 0.5).t(),
        "sliced": torch.arange(100)[7:93:3],
        "repeated": torch.ones(1).expand(4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }
    torch.save(odd, tmp_path / "odd.pt")
    found = read_torch(tmp_path / "odd.pt").models["model"]
    for name, tensor in odd.items():
        assert same(found[name].whole(), tensor), name
        middle = slice(tensor.numel() // 3, tensor.numel() // 2 + 1)
        assert same(found[name].read(middle.start, middle.stop), tensor.reshape(-1)[middle]), name
    write_torch(read_torch(tmp_path / "odd.pt"), tmp_path / "odd2.pt")
    assert same(torch.load(tmp_path / "odd2.pt", weights_only=True), odd)


@pytest.mark.parametrize(
    "keys",
    [
        ("model", "optimizer"),
        ("state_dict", "optimizer"),
        ("model_state_dict", "optimizer_state_dict"),
        ("model", "optim"),
        ("state_dict", "optimizer_states"),
    ],
)
def test_both_in_one_file_with_what_else_is_there(tmp_path: Path, keys: tuple[str, str]) -> None:
    model, optimizer = trained("adam")
    of_optimizer: Any = optimizer.state_dict()
    if keys[1] == "optimizer_states":
        of_optimizer = [of_optimizer]
    torch.save({keys[0]: model.state_dict(), keys[1]: of_optimizer, "epoch": 3, "rng": torch.ones(3)}, tmp_path / "f")
    state = read_torch(tmp_path / "f")
    assert same(whole(dict(state.models["model"])), dict(model.state_dict()))
    assert state.optimizers["optimizer"].step == 3 and len(state.optimizers["optimizer"].state) > 3
    assert same(state.extra, {"epoch": 3, "rng": torch.ones(3)})


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_wrappers_prefixes_are_taken_off(tmp_path: Path, prefix: str) -> None:
    model, optimizer = trained("adam", named=True)
    weights = {prefix + name: value for name, value in model.state_dict().items()}
    moments = optimizer.state_dict()
    moments["param_groups"][0]["param_names"] = [prefix + each for each in moments["param_groups"][0]["param_names"]]
    torch.save({"model": weights, "optim": moments}, tmp_path / "f.pt")
    state = read_torch(tmp_path / "f.pt")
    assert set(state.models["model"]) == set(model.state_dict())
    assert set(state.optimizers["optimizer"].state) <= set(model.state_dict())


def test_a_part_that_is_really_called_module_keeps_its_name(tmp_path: Path) -> None:
    torch.save({"module.w": torch.ones(1), "head.w": torch.ones(1)}, tmp_path / "f.pt")
    assert set(read_torch(tmp_path / "f.pt").models["model"]) == {"module.w", "head.w"}
    torch.save({"a._orig_mod.w": torch.ones(1), "a.w": torch.ones(1)}, tmp_path / "g.pt")
    with pytest.raises(StateError, match="the same name"):
        read_torch(tmp_path / "g.pt")


class Normed(torch.nn.Module):
    """Buffers among the parameters, of a kind that can be told and of one that cannot."""

    def __init__(self, *, secret: bool = False) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.last = torch.nn.Linear(5, 5)
        if secret:
            self.register_buffer("scale", torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))  # type: ignore[no-any-return]


def normed(tmp_path: Path, *, secret: bool = False, groups: bool = False, named: bool = False) -> Normed:
    model = Normed(secret=secret)
    params: Any = list(model.named_parameters() if named else model.parameters())
    optimizer = torch.optim.Adam([{"params": params[3:]}, {"params": params[:3]}] if groups else params)
    train(model, optimizer, range(2))
    torch.save(model.state_dict(), tmp_path / "m.pt")
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    return model


def test_buffers_are_not_counted_where_they_can_be_told(tmp_path: Path) -> None:
    model = normed(tmp_path)
    state = read_torch(tmp_path / "m.pt", tmp_path / "o.pt")
    assert list(state.optimizers["optimizer"].state) == [name for name, _ in model.named_parameters()]


def test_names_that_cannot_be_told_are_asked_for(tmp_path: Path) -> None:
    model = normed(tmp_path, secret=True)
    with pytest.raises(StateError, match=r"6 parameters without names, and the model 10 tensors.*pass names="):
        read_torch(tmp_path / "m.pt", tmp_path / "o.pt")
    names = [name for name, _ in model.named_parameters()]
    state = read_torch(tmp_path / "m.pt", tmp_path / "o.pt", names=names)
    assert list(state.optimizers["optimizer"].state) == names
    with pytest.raises(StateError, match="6 parameters, but names= has 5"):
        read_torch(tmp_path / "m.pt", tmp_path / "o.pt", names=names[:5])
    with pytest.raises(StateError, match="in another order"):
        read_torch(tmp_path / "m.pt", tmp_path / "o.pt", names=[names[1], names[0], *names[2:]])
    with pytest.raises(StateError, match="must be different texts"):
        read_torch(tmp_path / "m.pt", tmp_path / "o.pt", names=names[:5] + names[:1])
    with pytest.raises(StateError, match="the model does not have: nowhere"):
        read_torch(tmp_path / "m.pt", tmp_path / "o.pt", names=[*names[:5], "nowhere"])
    with pytest.raises(StateError, match="no model file"):
        read_torch(optimizer=tmp_path / "o.pt")
    assert list(read_torch(optimizer=tmp_path / "o.pt", names=names).optimizers["optimizer"].state) == names


def test_the_order_of_several_groups_is_never_guessed(tmp_path: Path) -> None:
    normed(tmp_path, groups=True)
    with pytest.raises(StateError, match="over 2 groups"):
        read_torch(tmp_path / "m.pt", tmp_path / "o.pt")
    model = normed(tmp_path, groups=True, named=True)
    state = read_torch(tmp_path / "m.pt", tmp_path / "o.pt").optimizers["optimizer"]
    names = [name for name, _ in model.named_parameters()]
    assert [group["params"] for group in state.groups] == [names[3:], names[:3]]


def test_optimizers_by_name_nested_and_flattened_are_read(tmp_path: Path) -> None:
    state = small_state()
    from shardrt.interchange.backed import FileBacked
    from shardrt.interchange.optimizers import dict_from_optimizer, flattened

    nested = dict_from_optimizer(state.optimizers["optimizer"], FileBacked(tmp_path).tree, numbered=False)
    for number, raw in enumerate((nested, flattened(nested))):
        torch.save(raw, tmp_path / f"{number}.pt")
        found = read_torch(optimizer=tmp_path / f"{number}.pt")
        assert same(whole(found.optimizers["optimizer"]), whole(state.optimizers["optimizer"]))


def broken(change: str) -> Any:
    raw: dict[str, Any] = {
        "state": {0: {"exp_avg": torch.ones(2)}},
        "param_groups": [{"lr": 0.1, "params": [0], "param_names": ["w"]}],
    }
    raw = copy.deepcopy(raw)
    match change:
        case "no params":
            del raw["param_groups"][0]["params"]
        case "odd params":
            raw["param_groups"][0]["params"] = [[]]
        case "twice":
            raw["param_groups"].append(dict(raw["param_groups"][0], param_names=["v"]))
        case "stranger":
            raw["state"][7] = {}
        case "no mapping":
            raw["state"][0] = [1]
        case "names":
            raw["param_groups"][0]["param_names"] = ["w", "v"]
    return raw


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("no params", "without a list of its 'params'"),
        ("odd params", "neither numbers nor names"),
        ("twice", "lists a parameter twice"),
        ("stranger", "state for 7, which no parameter group lists"),
        ("no mapping", "not a mapping"),
        ("names", "its param_names are 2"),
    ],
)
def test_malformed_optimizers_are_refused(tmp_path: Path, change: str, said: str) -> None:
    torch.save(broken(change), tmp_path / "o.pt")
    with pytest.raises(StateError, match=said):
        read_torch(optimizer=tmp_path / "o.pt")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1, 2], "holds a list"),
        (torch.ones(2), "holds a Tensor"),
        ({1: torch.ones(2)}, "holds a dict"),
        ({"w": torch.ones(2), "name": "x"}, "no tensors among the model's: name"),
        ({"model": {"w": 1}, "state_dict": {"w": 1}}, "both 'model' and 'state_dict'"),
        ({"model": [1]}, "holds a list where a model's state dict"),
        ({"state": {}, "param_groups": []}, "pass it as optimizer="),
        ({"model": {"w": torch.ones(1)}, "optimizer": {"a": 1}}, "is not an optimizer's state dict"),
        ({"w": torch.ones(2).to_sparse()}, "only dense ones"),
        ({"w": torch.ones(2, dtype=torch.uint16)}, "the dtype uint16"),
        ({"w": torch.ones(1).expand(2**38)}, "claims 1099511627776 bytes, but the file holds 4"),
    ],
)
def test_what_is_no_state_dict_is_refused(tmp_path: Path, value: Any, said: str) -> None:
    torch.save(value, tmp_path / "f.pt")
    with pytest.raises((CheckpointError, StateError), match=said) as caught:
        read_torch(tmp_path / "f.pt")
    assert "f.pt" in str(caught.value)


def test_pickles_that_would_run_code_are_refused_and_do_not(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    torch.save({"w": Canary(ran)}, tmp_path / "zip.pt")
    torch.save({"w": Canary(ran)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "bare.pt").write_bytes(pickle.dumps({"w": Canary(ran)}))
    for file in ("zip.pt", "old.pt", "bare.pt"):
        for role in ("model", "optimizer"):
            with pytest.raises(CheckpointError, match=f"{file} is not a file of tensors and plain values") as caught:
                read_torch(**{role: tmp_path / file})
            assert "weights_only" not in str(caught.value), "no advice to run it all the same"
    assert not ran.exists()
    pickle.loads((tmp_path / "bare.pt").read_bytes())
    assert ran.exists(), "the canary must be able to sing"


def test_files_of_before_torch_1_6_are_read(tmp_path: Path) -> None:
    weights = {"w": torch.randn(3, 2).t()}
    torch.save(weights, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert same(whole(dict(read_torch(tmp_path / "old.pt").models["model"])), weights)


def test_files_that_are_cut_off_or_not_there_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "f.pt")
    data = (tmp_path / "f.pt").read_bytes()
    for length in (0, 3, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.pt").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"cut\.pt"):
            read_torch(tmp_path / "cut.pt")
    with pytest.raises(CheckpointError, match=r"none\.pt cannot be read: No such file"):
        read_torch(tmp_path / "none.pt")


def test_damage_anywhere_is_an_error_of_ours_or_other_values(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.arange(40.0)}, "epoch": 3}, tmp_path / "f.pt")
    data = (tmp_path / "f.pt").read_bytes()
    refused = 0
    for at in range(0, len(data), 7):
        (tmp_path / "f.pt").write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            whole(read_torch(tmp_path / "f.pt"))
        except ShardrtError:
            refused += 1
    assert refused > 20


def test_what_only_a_pickle_could_hold_is_not_written(tmp_path: Path) -> None:
    state = small_state()
    group = {"lr": 0.1, "params": ["odd"], "rule": Path("x")}
    state = attrs.evolve(state, optimizers={"optimizer": PortableOptimizer(groups=(group,), state={})})
    with pytest.raises(StateError, match="holds a PosixPath"):
        write_torch(state, optimizer_path=tmp_path / "o.pt")
    assert list(tmp_path.iterdir()) == []


def test_state_in_lists_is_kept(tmp_path: Path) -> None:
    """LBFGS keeps lists of tensors."""
    layer = torch.nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=3)
    data = torch.randn(5, 3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(data).pow(2).mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    optimizer.step(closure)
    expected = optimizer.state_dict()
    assert isinstance(expected["state"][0]["old_dirs"], list) and expected["state"][0]["old_dirs"]
    torch.save(expected, tmp_path / "o.pt")
    state = read_torch(optimizer=tmp_path / "o.pt", names=["weight", "bias"])
    write_torch(state, optimizer_path=tmp_path / "o2.pt", named=False)
    assert same(torch.load(tmp_path / "o2.pt", weights_only=True), expected)
    write_dcp(state, tmp_path / "run")
    again = read_dcp(tmp_path / "run").optimizers["optimizer"].state["weight"]
    assert same(whole(dict(sorted(again.items()))), dict(sorted(expected["state"][0].items())))


def test_writing_says_what_it_lacks_and_leaves_nothing_behind(tmp_path: Path) -> None:
    state = small_state()
    with pytest.raises(StateError, match="needs a file"):
        read_torch()
    with pytest.raises(StateError, match="needs a path"):
        write_torch(state)
    with pytest.raises(StateError, match="room for one optimizer, but the state has 0: none"):
        write_torch(PortableState(models=state.models, optimizers={}), tmp_path / "m.pt", tmp_path / "o.pt")
    several = PortableState(models={"gan": {}, "critic": {}}, optimizers={})
    with pytest.raises(StateError, match="room for one model, but the state has 2: gan, critic"):
        write_torch(several, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_torch(state, tmp_path / "nowhere" / "m.pt")
    assert list(tmp_path.iterdir()) == []
    write_torch(state, tmp_path / "m.pt", tmp_path / "o.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.pt", "o.pt"]

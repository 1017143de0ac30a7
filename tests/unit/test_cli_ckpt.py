"""``shardrt ckpt inspect``, ``reshard``, ``consolidate``: what they tell, and that they write the same state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardrt
from shardrt.checkpoint.manifest import Manifest
from tests.unit.ckpt_runs import Tied, document, run, save, train


def manifest_of(checkpoint: Any) -> Manifest:
    path = Path(checkpoint) / "manifest.json"
    return Manifest.from_bytes(path.read_bytes(), where=str(path))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("ckpt") / "run")


def loads_as_it_was(path: str) -> None:
    with shardrt.Runtime() as rt:
        expected, before = train(rt)
        model, opt = train(rt, steps=0)
        extra = rt.load(path, model=model, optimizer=opt)
        assert opt.param_groups[1]["lr"] == 0.02 and opt.steps_taken == 2
    assert extra["names"] == ("a", "b") and extra[4] == {1, 2} and extra["big"].numel() == 20_000
    got, wanted = model.state_dict(), expected.state_dict()
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value, name
    assert model.head.weight is model.embed.weight
    one, other = opt.state_dict(), before.state_dict()
    assert one["param_groups"] == other["param_groups"] and one["state"].keys() == other["state"].keys()
    for number, values in other["state"].items():
        assert values.keys() == one["state"][number].keys()
        for key, value in values.items():
            found = one["state"][number][key]
            assert found.dtype == value.dtype and found.shape == value.shape and torch.equal(found, value), key


@pytest.mark.parametrize("partitioner", ["greedy", "flat"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_resharded_checkpoint_is_the_same_state(saved: Path, tmp_path: Path, partitioner: str, ranks: int) -> None:
    told = document("reshard", saved, tmp_path / "out", "--ranks", ranks, "--partitioner", partitioner)
    assert (told["source_ranks"], told["ranks"]) == (1, ranks)
    assert bool(told["notes"]) == (ranks != 1)
    manifest = manifest_of(told["path"])
    assert (manifest.world_size, len(manifest.files), manifest.step) == (ranks, ranks, 2)
    assert len(manifest.random) == (1 if ranks == 1 else 0)
    cut = any(len(spread.pieces) > 1 for spread in manifest.models["model"].tensors.values())
    assert cut == (partitioner == "flat" and ranks > 1)
    assert document("diff", saved, tmp_path / "out")["same"]
    assert document("verify", tmp_path / "out")["ok"]
    loads_as_it_was(told["path"])


def test_every_rank_gets_its_share(saved: Path, tmp_path: Path) -> None:
    told = document("reshard", saved, tmp_path / "out", "--ranks", 4, "--partitioner", "flat")
    manifest = manifest_of(told["path"])
    shares = [
        sum(
            piece.stop - piece.start
            for param in manifest.optimizers["optimizer"].params.values()
            for spread in param.sliced.values()
            for piece in spread.pieces
            if piece.file == number
        )
        for number in range(4)
    ]
    assert max(shares) <= min(shares) * 1.5 and min(shares) > 0
    assert manifest.optimizers["optimizer"].plan["partitioner"] == "flat"
    assert manifest.runtime["offline"] == "reshard" and "source" not in manifest.runtime["source"]["runtime"]


def test_the_new_one_is_the_latest_of_its_root(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = document("reshard", saved, out, "--ranks", 2)["path"]
    second = document("reshard", first, out, "--ranks", 3)["path"]
    assert [Path(path).name for path in (first, second)] == ["save-000001-step-000002", "save-000002-step-000002"]
    told = document("inspect", out)
    assert told["latest"] == "save-000002-step-000002"
    assert [(row["ranks"], row["state"]) for row in told["checkpoints"]] == [(2, "complete"), (3, "complete")]


class Mine(torch.optim.AdamW):
    """Not known to be elementwise: a subclass may change the update."""


def test_what_is_not_known_to_be_elementwise_is_kept_whole(tmp_path: Path) -> None:
    saved = save(tmp_path / "run", Mine)
    refused = run("reshard", saved, tmp_path / "out", "--ranks", 2, "--partitioner", "flat")
    assert refused.exit_code == 1
    assert "Mine are kept whole" in refused.stderr and "use partitioner='greedy'" in refused.stderr
    assert not (tmp_path / "out").exists(), "nothing was begun"
    kept = manifest_of(document("reshard", saved, tmp_path / "out", "--ranks", 2)["path"])
    params = kept.optimizers["optimizer"].params.values()
    assert all(len(spread.pieces) == 1 for param in params for spread in param.sliced.values())
    flags = ("--ranks", 2, "--partitioner", "flat", "--elementwise")
    cut = manifest_of(document("reshard", saved, tmp_path / "cut", *flags)["path"])
    assert any(len(spread.pieces) > 1 for spread in cut.models["model"].tensors.values())


def test_a_checkpoint_of_a_model_alone_and_of_an_optimizer_alone(saved: Path, tmp_path: Path) -> None:
    for what, there in (("model", ["models"]), ("optimizer", ["optimizers"]), ("both", ["models", "optimizers"])):
        told = document("consolidate", saved, tmp_path / what, "--what", what)
        manifest = manifest_of(told["path"])
        assert [kind for kind in ("models", "optimizers") if getattr(manifest, kind)] == there
        found = document("diff", saved, tmp_path / what, code=0 if what == "both" else 1)["differences"]
        assert all(one["kind"] == "only in a" and not one["name"].startswith(there[0]) for one in found)
    again = document("reshard", tmp_path / "optimizer", tmp_path / "three", "--ranks", 3, "--partitioner", "flat")
    assert document("diff", tmp_path / "optimizer", again["path"])["same"]
    loads_as_it_was(str(tmp_path / "both"))


def test_weights_as_one_safetensors_file(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    told = document("consolidate", saved, tmp_path / "w.safetensors", "--format", "safetensors")
    assert told["notes"] == ["a safetensors file has no room for 'body._extra_state': left out"]
    with shardrt.Runtime() as rt:
        expected = train(rt)[0].state_dict()
    found = load_file(told["path"])
    assert found.keys() == expected.keys() - {"head.weight", "body._extra_state"}
    assert all(torch.equal(found[name], expected[name]) for name in found)
    again = run("consolidate", saved, tmp_path / "w.safetensors", "--format", "safetensors")
    assert again.exit_code == 1 and "is there already" in again.stderr


def test_several_models_must_be_chosen_from(tmp_path: Path) -> None:
    with shardrt.Runtime() as rt:
        path = rt.save(tmp_path / "run", model={"a": torch.nn.Linear(2, 1), "b": torch.nn.Linear(3, 1)}).path
    out = tmp_path / "b.safetensors"
    unclear = run("consolidate", path, out, "--format", "safetensors")
    assert unclear.exit_code == 1 and "'a', 'b'; choose with --model" in unclear.stderr
    unknown = run("consolidate", path, out, "--format", "safetensors", "--model", "c")
    assert unknown.exit_code == 1 and "no model 'c'; models in it: 'a', 'b'" in unknown.stderr
    assert document("consolidate", path, out, "--format", "safetensors", "--model", "b")["path"] == str(out)
    assert document("reshard", path, tmp_path / "out", "--ranks", 3, "--partitioner", "flat")["ranks"] == 3
    assert document("diff", path, tmp_path / "out")["same"]


def test_a_checkpoint_is_told_from_its_manifest_alone(saved: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    (copy / "rank-00000-of-00001.safetensors").unlink()
    told = document("inspect", copy)
    assert (told["step"], told["ranks"], told["random_states"]) == (2, 1, 1)
    assert (
        told["extra"]["epoch"] == 3 and told["extra"]["mean"] == "tensor float32 [5]" and told["extra"]["4"] == [1, 2]
    )
    model = told["models"]["model"]
    assert model["tensors"]["embed.weight"] == {
        "dtype": "float32",
        "shape": [60, 40],
        "bytes": 9600,
        "files": ["rank-00000-of-00001.safetensors"],
        "buffer": False,
    }
    assert model["tensors"]["norm.running_mean"]["buffer"] and model["aliases"] == {"head.weight": "embed.weight"}
    assert model["values"] == {"body._extra_state": {"seen": 7}}
    optimizer = told["optimizers"]["optimizer"]
    assert optimizer["class"] == "torch.optim.adamw.AdamW" and optimizer["step"] == 2
    assert [group["options"]["lr"] for group in optimizer["groups"]] == [0.01, 0.02]
    assert optimizer["params"]["small"]["state"]["exp_avg"]["dtype"] == "bfloat16"
    shown = run("inspect", copy)
    assert shown.exit_code == 0
    for words in ("embed.weight", "60 x 40", "head.weight is embed.weight", "torch.optim.adamw.AdamW", "lr=0.02"):
        assert words in shown.stdout


def test_a_root_lists_all_of_it(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(root, steps=1)
    save(root, steps=2)
    leftover = root / "save-000003-step-000009"
    leftover.mkdir()
    (leftover / "rank-00000-of-00001.safetensors").write_bytes(b"half")
    broken = root / "save-000004-step-000010"
    broken.mkdir()
    (broken / "manifest.json").write_text("{}")
    told = document("inspect", root)
    states = {row["name"]: row["state"] for row in told["checkpoints"]}
    assert list(states.values()) == ["complete", "complete", "leftover", "damaged"]
    assert told["latest"] == "save-000002-step-000002"
    assert told["checkpoints"][2]["bytes"] == 4
    shown = run("inspect", root)
    assert "latest" in shown.stdout and "leftover" in shown.stdout and "damaged" in shown.stdout
    assert document("inspect", root, "--step", 1)["step"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["inspect", "{empty}"], 1, "there is no complete checkpoint"),
        (["verify", "{saved}", "--step", "2"], 1, "is one checkpoint, and step=2 chooses among several"),
        (["reshard", "{saved}", "{empty}", "--ranks", "0"], 2, "0 is not in the range"),
        (["reshard", "{saved}", "{empty}"], 2, "Missing option '--ranks'"),
        (["reshard", "{saved}", "{empty}", "--ranks", "2", "--partitioner", "flt"], 1, "did you mean 'flat'?"),
        (["reshard", "{saved}", "{saved}", "--ranks", "2"], 1, "is itself a checkpoint"),
        (["consolidate", "{saved}", "x", "--format", "safetensors", "--what", "both"], 2, "room for weights only"),
        (["consolidate", "{saved}", "x", "--model", "model"], 2, "add --format safetensors"),
        (["verify", "{empty}", "--all", "--step", "1"], 2, "exclude each other"),
        (["difff"], 2, "did you mean 'diff'?"),
    ],
)
def test_mistakes_are_told(saved: Path, tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    filled = [argument.format(saved=saved, empty=tmp_path / "empty") for argument in arguments]
    result = run(*filled)
    assert (result.exit_code, words in " ".join(result.stderr.split())) == (code, True), result.stderr


def test_an_error_is_json_too(tmp_path: Path) -> None:
    result = run("verify", tmp_path / "nothing", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["type"] == "NoCheckpointError"


def test_a_save_that_fails_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    file = copy / "rank-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # in the last tensor: most of the new files are written by then
    file.write_bytes(data)
    last = list(manifest_of(copy).files[0].tensors)[-1]
    result = run("reshard", copy, tmp_path / "out", "--ranks", 1)
    assert result.exit_code == 1 and repr(last) in result.stderr
    assert document("inspect", saved)["step"] == 2
    assert [path.name for path in (tmp_path / "out").glob("save-*")] == []


def test_looking_at_the_commands_needs_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "from click.testing import CliRunner; from shardrt.cli import main; "
        "assert CliRunner().invoke(main, ['ckpt', '--help']).exit_code == 0; "
        "import sys; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_model_is_what_the_tests_need() -> None:
    assert {param.dtype for param in Tied().parameters()} == {torch.float32, torch.bfloat16}

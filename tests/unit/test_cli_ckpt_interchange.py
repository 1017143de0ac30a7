"""``shardrt ckpt import`` and ``export``: there and back, with each of the other programs' files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardrt
from tests.unit.ckpt_runs import document, run


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 4))
    with shardrt.Runtime() as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1)
        model(torch.randn(3, 20)).sum().backward()
        opt.step()
        saving = rt.save(tmp_path_factory.mktemp("ckpt") / "run", model=model, optimizer=opt, extra={"epoch": 3})
    return Path(saving.path)


@pytest.mark.parametrize(("kind", "lost"), [("dcp", set()), ("torch", {"extra"}), ("hf", {"extra", "optimizers"})])
def test_there_and_back(saved: Path, tmp_path: Path, kind: str, lost: set[str]) -> None:
    told = document("export", saved, tmp_path / "theirs", "--format", kind)
    assert told["kind"] == kind and len(told["notes"]) == 1 + len(lost)
    flags = ["--optimizer-class", "torch.optim.adamw.AdamW", "--ranks", 2, "--partitioner", "flat"]
    back = document("import", tmp_path / "theirs", tmp_path / "back", *flags)
    assert (back["kind"], back["ranks"]) == (kind, 2)
    assert document("verify", tmp_path / "back")["ok"]
    found = document("diff", saved, tmp_path / "back", code=1 if lost else 0)["differences"]
    assert {one["name"].partition("/")[0].partition("[")[0] for one in found} == lost
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 4))
    with shardrt.Runtime() as rt:
        rt.load(tmp_path / "back", model=model)


def test_what_torch_wrote_is_kept_whole_unless_its_class_is_told(saved: Path, tmp_path: Path) -> None:
    document("export", saved, tmp_path / "theirs", "--format", "torch")
    model, optimizer = tmp_path / "theirs" / "model.pt", tmp_path / "theirs" / "optimizer.pt"
    flags = ["--optimizer", optimizer, "--ranks", 2, "--partitioner", "flat"]
    refused = run("import", model, tmp_path / "back", *flags)
    assert refused.exit_code == 1 and "an optimizer of unknown class are kept whole" in refused.stderr
    swapped = run("import", optimizer, tmp_path / "back")
    assert swapped.exit_code == 1 and "pass it as optimizer= (--optimizer)" in swapped.stderr
    again = run("export", saved, tmp_path / "theirs", "--format", "torch")
    assert again.exit_code == 1 and "is there already" in again.stderr


def test_options_that_do_not_fit_the_source(saved: Path, tmp_path: Path) -> None:
    document("export", saved, tmp_path / "theirs", "--format", "hf")
    wrong = run("import", tmp_path / "theirs", tmp_path / "back", "--optimizer", "x.pt")
    assert wrong.exit_code == 2 and "is for files of torch.save" in " ".join(wrong.stderr.split())
    nothing = run("import", tmp_path, tmp_path / "back")
    assert nothing.exit_code == 1 and "nothing that can be imported" in nothing.stderr

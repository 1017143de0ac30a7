"""A distribution that is not ours: installed with pip, found by its entry points, used by name, right by its own tests.

It is the one that docs/writing-a-plugin.md builds. `python tasks.py test` installs it before the tests run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import shardrt
from shardrt.testing import RankPool
from tests.ranks.twins import Odd, batch, compare, largest_difference, twins

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "docs" / "tutorial" / "shardrt-stripes"
INSTALL = f"run: {Path(sys.executable).name} -m pip install --no-deps ./{SOURCE.relative_to(ROOT).as_posix()}"
TOLERANCE = 2e-6


@pytest.fixture(scope="module", autouse=True)
def distribution() -> metadata.Distribution:
    """The installed distribution; every test here needs it, as it is in the tree."""
    try:
        found = metadata.distribution("shardrt-stripes")
    except metadata.PackageNotFoundError:
        pytest.fail(f"the distribution of the tutorial is not installed; {INSTALL}")
    for source in (SOURCE / "shardrt_stripes").glob("*.py"):
        installed = Path(str(found.locate_file(f"shardrt_stripes/{source.name}")))
        if not installed.exists() or installed.read_text(encoding="utf-8") != source.read_text(encoding="utf-8"):
            pytest.fail(f"the installed {source.name} is not the one in the tree; {INSTALL}")
    return found


def test_it_is_a_distribution_of_its_own(distribution: metadata.Distribution) -> None:
    plugins = {point.name: point.value for point in distribution.entry_points if point.group == "shardrt"}
    assert plugins == {"stripes": "shardrt_stripes.stripes", "metered": "shardrt_stripes.metered"}
    assert any(str(path).endswith("shardrt_stripes/py.typed") for path in distribution.files or ())


def listed_plugins(**environment: str) -> dict[str, Any]:
    command = [sys.executable, "-c", "from shardrt.cli import main; main()", "plugins", "--json"]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=True
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_the_command_lists_both_plugins_with_distribution_and_version(distribution: metadata.Distribution) -> None:
    document = listed_plugins()
    origin = ("shardrt-stripes", distribution.version)
    [stripes] = [entry for entry in document["partitioners"] if entry["name"] == "stripes"]
    [metered] = [entry for entry in document["backends"] if entry["name"] == "metered"]
    assert (stripes["distribution"], stripes["version"]) == (metered["distribution"], metered["version"]) == origin
    assert stripes["available"] and metered["available"] and metered["device_type"] == "cpu"
    plugins = {plugin["name"]: plugin for plugin in document["plugins"] if plugin["distribution"] == origin[0]}
    assert {name: (plugin["status"], plugin["records"]) for name, plugin in plugins.items()} == {
        "stripes": ("ok", ["stripes"]),
        "metered": ("ok", ["cpu/metered"]),
    }


def test_without_gloo_the_wrapper_says_what_it_misses() -> None:
    document = listed_plugins(SHARDRT_PLUGINS="stripes,metered,sync")
    [metered] = document["backends"]
    assert not metered["available"]
    assert "unknown backend 'gloo'" in metered["reason"]
    assert "SHARDRT_PLUGINS" in metered["fix"]


def train(optimizer: str, size: int, gradients: str = "average") -> list[Any]:
    """As :func:`tests.ranks.twins.compare`, and whether pieces of a parameter really lie apart in a bucket."""
    runtime = {"partitioner": {"name": "stripes", "size": size}, "backend": "metered", "bucket_mb": 0.001}
    found = compare(optimizer, runtime=runtime, gradients=gradients)
    with shardrt.Runtime(partitioner=runtime["partitioner"], backend="metered", timeout=30) as rt:
        opt = rt.optimizer(Odd().named_parameters(), torch.optim.SGD, lr=0.1)
        alternating = [shard.rank for shard in opt.plan.partition.by_param["inner.weight"]]
        return [found["difference"], found["moved"], rt.backend, opt.plan.partitioner, alternating]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("optimizer", ["adamw_foreach", "sgd_momentum", "adafactor"])
def test_training_equals_the_unsharded_twin(ranks: RankPool, optimizer: str, world_size: int) -> None:
    for difference, moved, *used, owners in ranks.run(train, ranks=world_size, optimizer=optimizer, size=16):
        assert moved > 1e-3
        assert difference <= (0.0 if world_size == 2 else TOLERANCE)
        assert used == ["metered", "stripes"]
        assert all(one != other for one, other in pairwise(owners)) and len(owners) > world_size


def train_under_ddp() -> list[float]:
    """Gradients that DDP has reduced, on parameters in stripes."""
    model, twin = twins(lambda: Odd(matrices_only=True))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    twin_ddp = torch.nn.parallel.DistributedDataParallel(twin)
    with shardrt.Runtime(partitioner={"name": "stripes", "size": 16}, backend="metered", timeout=30) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, gradients="reduced", lr=1e-2)
        norms = []
        for step in range(10):
            for one, optimizer in ((ddp, opt), (twin_ddp, plain)):
                one(batch(step, rt.rank)).pow(2).mean().backward()
                if optimizer is opt:
                    norms.append(float(rt.clip_grad_norm_(opt, 0.1)))
                else:
                    norms[-1] -= float(torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1))
                optimizer.step()
                optimizer.zero_grad()
        return [largest_difference(model.parameters(), twin.parameters()), max(map(abs, norms))]


@pytest.mark.parametrize("world_size", [2, 3])
def test_under_ddp_with_clipping(ranks: RankPool, world_size: int) -> None:
    for difference, norm_difference in ranks.run(train_under_ddp, ranks=world_size):
        assert difference <= TOLERANCE
        assert norm_difference <= TOLERANCE


QUICK = (
    "not 3-ranks and not negotiated and not dtypes and not pieces and not output and not covers_every_element "
    "and not uneven and not missing and not sizes and not broadcast and not all_to_all and not reduce"
)


@pytest.mark.parametrize("which", [QUICK, pytest.param("", marks=pytest.mark.long)], ids=["some", "all"])
def test_its_own_tests_pass(which: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", which, str(SOURCE / "tests")],
        cwd=SOURCE,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout.splitlines()[-1]
    assert "skipped" not in done.stdout

"""torch's ZeroRedundancyOptimizer with another import: torch's own examples, and the results of DDP without it."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

import shardrt
from shardrt import compat
from shardrt.compat import ZeroRedundancyOptimizer
from shardrt.compat.errors import OverlapError
from shardrt.errors import ConfigError, UnsupportedError
from shardrt.testing import RankPool
from tests.ranks import zero_recipe
from tests.ranks.test_overlap import Deep
from tests.ranks.twins import Odd, average_backward, batch, largest_difference, twins

ROOT = Path(__file__).parents[2]


def torchs_own(name: str) -> Any:
    """A name of torch's. Importing its module compiles functions with an interface that torch has deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.", category=DeprecationWarning)
        import torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook as hooks
        from torch.distributed.optim import ZeroRedundancyOptimizer as Theirs
    return Theirs if name == "ZeroRedundancyOptimizer" else getattr(hooks, name)


def shape_of(function: Any) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", [name for name in compat.__all__ if "ero" in name])
def test_signatures_are_torchs(name: str) -> None:
    ours, theirs = getattr(compat, name), torchs_own(name)
    assert shape_of(ours) == shape_of(theirs)
    if inspect.isclass(theirs):
        public = [each for each in vars(theirs) if not each.startswith("_")]
        assert {"step", "add_param_group", "consolidate_state_dict", "join_device"} <= set(public)
        for each in public:
            method = getattr(theirs, each)
            if inspect.isfunction(method):
                assert shape_of(getattr(ours, each)) == shape_of(method), each
            else:
                assert hasattr(ours, each)


def documented_example() -> list[str]:
    """Run the example of torch's own docstring, changed in its import, its devices and the size of its layers."""
    text = inspect.getdoc(torchs_own("ZeroRedundancyOptimizer"))
    assert text is not None
    lines = re.findall(r"^ *>>> ?(.*)$", text[text.index("Example::") : text.index(".. warning::")], re.MULTILINE)
    example = textwrap.dedent("\n".join(lines))
    changes = {
        "from torch.distributed.optim import": "from shardrt.compat import",
        ".to(rank)": "",
        ", device_ids=[rank]": "",
        "2000": "30",
    }
    for before, after in changes.items():
        assert before in example
        example = example.replace(before, after)
    inputs = torch.randn(4, 30, generator=torch.Generator().manual_seed(dist.get_rank()))
    namespace: dict[str, Any] = {"torch": torch, "inputs": inputs}
    exec(example, namespace)
    opt = namespace["opt"]
    assert type(opt).__module__.startswith("shardrt.") and isinstance(opt, torch.optim.Optimizer)
    stepped = len(opt.optim.state)
    digest = sum(param.detach().double().sum().item() for param in namespace["ddp"].parameters())
    return [str(stepped), f"{digest:.12f}"]


def test_torchs_own_example_runs_with_another_import(ranks: RankPool) -> None:
    found = ranks.run(documented_example, ranks=2)
    assert [int(stepped) for stepped, _ in found] == [20, 20]  # of 40 parameters
    assert found[0][1] == found[1][1]


def run_script(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        cwd=ROOT,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr[-4000:]
    return done.stdout


def environment() -> dict[str, str]:
    """This one without a launcher's variables, and with output that comes line by line from several processes."""
    unwanted = (
        "PYTHONUNBUFFERED",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    kept |= {"PYTHONPATH": ":".join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    if "lo" in {name for _, name in socket.if_nameindex()}:
        kept.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return kept


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_torchs_recipe_runs_as_a_script(ranks: RankPool) -> None:
    """It spawns its ranks, and they end without having destroyed their group or their optimizer."""
    printed = run_script("tests/ranks/zero_recipe.py", free_port())
    owned = [int(size) for size in re.findall(r"state elements on rank \d: (\d+)", printed)]
    whole = 20 * (zero_recipe.WIDTH**2 + zero_recipe.WIDTH)
    assert len(owned) == 2 and sum(owned) == whole and max(owned) < 0.6 * whole
    sums = re.findall(r"params sum is: (-?\d+\.\d+)", printed)
    # Its ranks have the same data, so one rank alone gets what two do.
    alone: dict[str, Any] = {"rank": 0, "world_size": 1, "use_zero": False, "port": free_port()}
    assert sums == 2 * ranks.run(zero_recipe.example, ranks=1, init=None, launcher=False, **alone)


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups, unnamed as torch's optimizer wants them."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 2e-2}]


def under_ddp(steps: int, added: bool = False, scaled: bool = False) -> list[float]:
    """DDP with the optimizer and its twin with the plain one: the largest difference after each step."""
    ours, theirs = twins(Deep)
    ddp, twin = DistributedDataParallel(ours), DistributedDataParallel(theirs)
    differences = []
    zero = ZeroRedundancyOptimizer(groups_of(ddp)[: 1 if added else 2], torch.optim.AdamW, lr=1e-2)
    plain = torch.optim.AdamW(groups_of(twin)[: 1 if added else 2], lr=1e-2)
    if added:
        zero.add_param_group(groups_of(ddp)[1])
        plain.add_param_group(groups_of(twin)[1])
    pairs = [
        (
            model,
            opt,
            torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps),
            torch.amp.GradScaler("cpu", enabled=scaled),
        )
        for model, opt in ((ddp, zero), (twin, plain))
    ]
    for step in range(steps):
        for model, opt, scheduler, scaler in pairs:
            opt.zero_grad()
            # At this step the scaler finds an infinity, on one rank before DDP's reduction, and skips the update.
            boost = float("inf") if scaled and step == 2 and dist.get_rank() == 1 else 1.0
            scaler.scale(model(batch(step, dist.get_rank())).pow(2).mean() * boost).backward()
            scaler.step(opt)
            scaler.update()
            scheduler.step()
        differences.append(largest_difference(ours.parameters(), theirs.parameters()))
    assert zero.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    return differences


@pytest.mark.parametrize("options", [{}, {"added": True}, {"scaled": True}])
def test_equals_ddp_with_the_plain_optimizer(ranks: RankPool, options: dict[str, bool]) -> None:
    for differences in ranks.run(under_ddp, ranks=2, steps=8, **options):
        assert differences == [0.0] * 8


def closure_of(model: Odd, opt: torch.optim.Optimizer, data: torch.Tensor) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        opt.zero_grad()
        hidden = torch.tanh(model.inner(torch.tanh(model.embed(data))))
        loss = (model.out(torch.tanh(model.tied(hidden)).double()) * model.scale).pow(2).mean()
        loss.backward()
        return loss

    return closure


def what_torch_refuses() -> list[float]:
    """Named parameters of two dtypes with a scalar among them, in a subgroup whose ranks are not the global ones."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return [0.0, 0.0, 0.0]
    ours, theirs = twins(Odd)
    for each in (ours, theirs):
        each.out.double()
    differences = []
    zero = ZeroRedundancyOptimizer(ours.named_parameters(), torch.optim.AdamW, process_group=group, lr=1e-2)
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    assert (zero.rank, zero.world_size, zero.global_rank) == (dist.get_rank() - 1, 2, dist.get_rank())
    for step in range(3):
        losses = [opt.step(closure_of(model, opt, batch(step, 0))) for model, opt in ((ours, zero), (theirs, plain))]
        assert losses[0].item() == losses[1].item()
        differences.append(largest_difference(ours.parameters(), theirs.parameters()))
    return differences


def test_takes_what_torchs_refuses(ranks: RankPool) -> None:
    assert ranks.run(what_torch_refuses, ranks=3) == [[0.0] * 3] * 3


def own_gradients() -> None:
    model = torch.nn.Linear(7, 3)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(batch(0, dist.get_rank())).sum().backward()
    zero.step()


def test_gradients_that_nobody_reduced_are_noticed(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(own_gradients, ranks=2):
        assert outcome.error_type == "HandshakeError"
        assert "digest of gradients said to be reduced" in outcome.error_message


def comes_and_goes() -> list[list[str]]:
    """Names of this package's threads while an optimizer lives, after it has died, and after its group has."""
    before = set(threading.enumerate())  # a call that failed on purpose may have left some that are still ending

    def ours() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name.startswith("shardrt") and each not in before]

    found = []
    for destroyed in (False, True):
        ddp = DistributedDataParallel(Deep())
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam)
        scheduler = torch.optim.lr_scheduler.StepLR(zero, 1)
        ddp(batch(0, dist.get_rank())).sum().backward()
        zero.step()
        scheduler.step()
        found.append(ours())
        if destroyed:
            dist.barrier()
            dist.destroy_process_group()
        del ddp, zero, scheduler
        gc.collect()
        found.append(ours())
    return found


def test_no_thread_outlives_the_optimizer(ranks: RankPool) -> None:
    for alive, dead, alive_again, after_the_group in ranks.run(comes_and_goes, ranks=2):
        assert alive and alive_again
        assert dead == [] and after_the_group == []


def consolidated(fused: bool) -> dict[str, Any]:
    """As torch documents it: on the rank it was consolidated on, elsewhere a RuntimeError; loaded on all ranks."""
    model, twin = twins(lambda: torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)))
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, fused=fused)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.01, fused=fused)
    world_size = dist.get_world_size()

    def train(optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            for trained, opt in ((model, optimizer), (twin, plain)):
                average_backward(trained, lambda rank: trained(batch(step, rank)).pow(2).mean(), world_size)  # noqa: B023
                opt.step()
                opt.zero_grad()

    train(zero, 0, 3)
    zero.consolidate_state_dict(to=1)
    found: dict[str, Any] = {}
    try:
        state = zero.state_dict()
    except RuntimeError as error:
        found["told"] = str(error)
        state = plain.state_dict()
    expected = plain.state_dict()["state"]
    found["equal"] = all(torch.equal(state["state"][n][k], expected[n][k]) for n in expected for k in expected[n])
    kept = copy.deepcopy(state)
    again = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.5, fused=fused)
    again.load_state_dict(state)
    train(again, 3, 6)
    found["untouched"] = all(
        torch.equal(state["state"][n][k], kept["state"][n][k]) for n in expected for k in expected[n]
    )
    return {**found, "difference": largest_difference(model.parameters(), twin.parameters())}


@pytest.mark.parametrize("fused", [False, True])
def test_state_is_consolidated_on_one_rank(ranks: RankPool, fused: bool) -> None:
    first, second = ranks.run(consolidated, ranks=2, fused=fused)
    assert "call consolidate_state_dict(to=0) on all ranks first" in first.pop("told")
    assert first["equal"] and second["equal"]
    assert first["difference"] == second["difference"] == 0.0
    assert second["untouched"]


def test_on_one_rank_the_state_can_be_saved_and_loaded() -> None:
    ours, theirs = twins(lambda: torch.nn.Linear(7, 3))
    optimizers = [ZeroRedundancyOptimizer(m.parameters(), torch.optim.Adam, lr=0.1) for m in (ours, theirs)]
    ours(batch(0, 0)).sum().backward()
    optimizers[0].step()
    optimizers[0].consolidate_state_dict(to=0)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    theirs.load_state_dict(ours.state_dict())
    for step in (1, 2):
        for model, opt in zip((ours, theirs), optimizers, strict=True):
            opt.zero_grad()
            model(batch(step, 0)).pow(2).sum().backward()
            opt.step()
    assert largest_difference(ours.parameters(), theirs.parameters()) == 0.0


@pytest.mark.parametrize(
    ("params", "kind", "said"),
    [
        (torch.zeros(2), TypeError, r"pass \[tensor\]"),
        (3, TypeError, "iterable of parameters"),
        ([torch.zeros(2), {"params": []}], TypeError, "every parameter group must be a dict with 'params'"),
        ([1.0], TypeError, "takes parameters or"),
        ([], ValueError, "empty parameter list"),
        ([{"lr": 0.1}], ValueError, "a dict with 'params'"),
    ],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_wrong_parameters_raise_what_torch_raises(params: Any, kind: type, said: str, overlap: bool) -> None:
    with pytest.raises(kind, match=said) as caught:
        ZeroRedundancyOptimizer(params, torch.optim.SGD, overlap_with_ddp=overlap, lr=0.1)
    assert isinstance(caught.value, shardrt.ShardrtError)


def test_other_misuse_is_refused_with_a_reason() -> None:
    params = [torch.nn.Parameter(torch.zeros(2))]
    zero = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    assert isinstance(zero, Joinable) and zero.join_device == torch.device("cpu")
    with pytest.raises(UnsupportedError, match="'gradients': arguments for the local optimizer's step"):
        zero.step(gradients=[])
    with pytest.raises(OverlapError, match="Join context"):
        Join([ZeroRedundancyOptimizer(params, torch.optim.SGD, overlap_with_ddp=True, lr=0.1)])
    with pytest.raises(UnsupportedError, match="cannot be copied"):
        copy.deepcopy(zero)
    with pytest.raises(ConfigError, match="pass the ordinary class"):
        ZeroRedundancyOptimizer(params, torch.optim.SGD(params, lr=0.1), lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Invalid learning rate"):
        ZeroRedundancyOptimizer(params, torch.optim.SGD, overlap_with_ddp=True, lr=-1.0)

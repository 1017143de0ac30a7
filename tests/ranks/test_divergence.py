"""Ranks that go different ways after everything was agreed: an error on every rank, and never another rank's data."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardrt
from shardrt.testing import RankPool
from tests.ranks.twins import Odd, batch


def _trained(rt: shardrt.Runtime, prefix: str = "", **options: Any) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(1)
    model = Odd()
    named = [(prefix + name, param) for name, param in model.named_parameters()]
    opt = rt.optimizer(named, torch.optim.SGD, lr=0.1, **options)
    model(batch(0, rt.rank)).pow(2).mean().backward()
    return model, opt


def crossed(several_runtimes: bool) -> None:
    """Two optimizers, stepped in another order on rank 1."""
    first = shardrt.Runtime(timeout=3)
    second = shardrt.Runtime(timeout=3) if several_runtimes else first
    _, a = _trained(first, "a.")
    _, b = _trained(second, "b.")
    for opt in (a, b) if first.rank == 0 else (b, a):
        opt.step()


def clips_alone(who: int) -> None:
    with shardrt.Runtime(timeout=3) as rt:
        model, opt = _trained(rt)
        if rt.rank == who:
            rt.clip_grad_norm_(model, 1.0)
        opt.step()


def steps_alone() -> None:
    with shardrt.Runtime(timeout=3) as rt:
        _, opt = _trained(rt)
        opt.step()
        if rt.rank == 1:
            opt.step()


@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        (crossed, {"several_runtimes": False}),
        (crossed, {"several_runtimes": True}),
        (clips_alone, {"who": 0}),
        (clips_alone, {"who": 1}),
    ],
)
def test_calls_in_different_orders_end_in_an_error(ranks: RankPool, scenario: Any, options: dict[str, Any]) -> None:
    for outcome in ranks.outcomes(scenario, ranks=2, timeout=40, **options):
        assert outcome.error_type in ("CommunicationError", "PeerError"), outcome
        assert f"rank {1 - outcome.rank}" in outcome.error_message
        assert outcome.seconds < 25


def test_a_rank_that_steps_once_more_is_told(ranks: RankPool) -> None:
    outcomes = ranks.outcomes(steps_alone, ranks=2, timeout=40)
    assert outcomes[0].ok
    assert outcomes[1].error_type == "CommunicationError" and "rank 0" in outcomes[1].error_message


def different_options(what: str, gradients: str, schedule: str) -> None:
    with shardrt.Runtime(timeout=10, schedule=schedule) as rt:
        model, opt = _trained(rt, gradients=gradients)
        if gradients == "reduced":
            for param in model.parameters():
                param.grad = torch.ones_like(param)
        opt.step()
        if what == "lr":
            opt.param_groups[0]["lr"] = 0.1 if rt.rank != 1 else 0.2
        else:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
            for epoch in range(3):
                scheduler.step(1.0 if rt.rank == 1 else -float(epoch))
        opt.zero_grad()
        model(batch(1, rt.rank)).pow(2).mean().backward()
        opt.step()


@pytest.mark.parametrize(
    ("what", "gradients", "schedule"),
    [
        ("lr", "average", "sync"),
        ("plateau", "average", "sync"),
        ("lr", "reduced", "sync"),
        ("lr", "average", "bucket"),
        ("lr", "average", "interleaved"),
    ],
)
def test_options_that_come_to_differ_are_noticed(ranks: RankPool, what: str, gradients: str, schedule: str) -> None:
    for outcome in ranks.outcomes(different_options, ranks=3, what=what, gradients=gradients, schedule=schedule):
        assert outcome.error_type == "HandshakeError", outcome
        assert "on group options[0]['lr']: rank 1 has " in outcome.error_message


def different_clipping(what: str) -> None:
    with shardrt.Runtime(timeout=10) as rt:
        model, _ = _trained(rt)
        odd = rt.rank == 1
        rt.clip_grad_norm_(
            model, 0.2 if odd and what == "max_norm" else 0.1, 1.0 if odd and what == "norm_type" else 2.0
        )


@pytest.mark.parametrize("what", ["max_norm", "norm_type"])
def test_clipping_must_be_the_same_everywhere(ranks: RankPool, what: str) -> None:
    for outcome in ranks.outcomes(different_clipping, ranks=3, what=what):
        assert outcome.error_type == "HandshakeError"
        assert f"ranks clip with different {what}: between" in outcome.error_message


def different_initial() -> None:
    with shardrt.Runtime(timeout=10) as rt:
        _trained(rt, initial="check" if rt.rank == 1 else "broadcast")


def test_initial_must_be_the_same_everywhere(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(different_initial, ranks=2):
        assert outcome.error_type == "HandshakeError"
        assert "on initial: rank 1 has 'check', rank 0 has 'broadcast'" in outcome.error_message


def other_world_size() -> None:
    if os.environ["RANK"] == "1":
        os.environ["WORLD_SIZE"] = "3"
    shardrt.Runtime(timeout=5)


def test_different_world_sizes_are_noticed_at_once(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(other_world_size, ranks=2, init=None):
        assert outcome.error_type == "HandshakeError", outcome
        assert "rank 0 has 2, rank 1 has 3; fix: start every rank with the same WORLD_SIZE" in outcome.error_message
        assert outcome.seconds < 10


def build() -> None:
    shardrt.Runtime()


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "0"}, "RANK=0 is set but WORLD_SIZE is not"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK='x' is not a whole"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a whole number"),
    ],
)
def test_launcher_variables_that_make_no_sense(ranks: RankPool, variables: dict[str, str], text: str) -> None:
    [outcome] = ranks.outcomes(build, ranks=1, init=None, launcher=False, env=variables)
    assert outcome.error_type == "ConfigError" and text in outcome.error_message


def counted_once() -> list[float]:
    with shardrt.Runtime(timeout=10) as rt:
        model, _ = _trained(rt)
        alone = float(rt.clip_grad_norm_(model, 1e9))
        rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
        return [alone, float(rt.clip_grad_norm_(model, 1e9))]


def test_a_parameter_of_two_optimizers_counts_once(ranks: RankPool) -> None:
    for alone, shared in ranks.run(counted_once, ranks=2):
        assert alone == shared


def copies_itself() -> None:
    with shardrt.Runtime(timeout=10) as rt:
        copy.deepcopy(_trained(rt)[1])


@pytest.mark.parametrize("world_size", [1, 2])
def test_copies_are_refused(ranks: RankPool, world_size: int) -> None:
    for outcome in ranks.outcomes(copies_itself, ranks=world_size):
        assert outcome.error_type == "UnsupportedError" and "cannot be copied or pickled" in outcome.error_message


SCRIPT = """
import torch, shardrt
rt = shardrt.Runtime(timeout=20)
model = torch.nn.Linear(4, 4)
opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
model(torch.ones(1, 4)).sum().backward()
if rt.rank == 1:
    rt.report_failure(ValueError("bad batch"))
    import time; time.sleep(3)
    raise SystemExit(7)
try:
    opt.step()
except shardrt.ShardrtError as error:
    print("told:", error, flush=True)
    raise SystemExit(5)
"""


def test_a_rank_that_was_told_of_a_failure_ends_in_order(tmp_path: Path) -> None:
    """A thread that is still in the network layer must not take the process down when the interpreter ends."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    done = subprocess.run([*command, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert "told: rank 0 stops because rank 1 failed: ValueError: bad batch" in done.stdout
    assert "exitcode  : 5" in done.stderr and "terminate called" not in done.stderr, done.stderr

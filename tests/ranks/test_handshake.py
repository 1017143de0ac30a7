"""One rank deviates: all ranks raise the same error, quickly, with the rank, the field and both values."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from shardrt_greedy.partitioner import GreedyPartitioner

import shardrt
from shardrt.testing import RankPool
from shardrt.testing.outcome import Outcome

ODD = 1
"""The rank that deviates, out of three."""


class Other(torch.optim.AdamW):
    """Another class."""


class Unstable(GreedyPartitioner):
    """Gives another partition on every rank."""

    def partition(self, request: shardrt.PartitionRequest) -> shardrt.Partition:
        import os

        rank = int(os.environ["RANK"])
        shards = [shardrt.Shard(spec.name, 0, spec.numel, rank) for spec in request.params]
        return shardrt.Partition(world_size=request.world_size, shards=tuple(shards))


class Extra:
    """A plugin that only one rank has."""

    @shardrt.hookimpl
    def shardrt_schedules(self) -> Any:
        yield shardrt.ScheduleRecord(name="extra", summary="nobody else has it", factory=object)


def _params(odd: str) -> list[tuple[str, torch.nn.Parameter]]:
    names = {"names": ["a", "b", "x"], "order": ["b", "a", "c"]}.get(odd, ["a", "b", "c"])
    shape = (5, 3) if odd == "shapes" else (3, 5)
    dtype = torch.float64 if odd == "dtypes" else torch.float32
    params = [(name, torch.nn.Parameter(torch.ones(shape, dtype=dtype))) for name in names]
    params[0][1].requires_grad_(odd != "trained")
    return params[:2] if odd == "count" else params


def _groups(odd: str) -> list[dict[str, Any]]:
    params = _params(odd)
    cut = 2 if odd == "groups" else 1
    return [{"params": params[:cut], "lr": 0.5 if odd == "group options" else 0.1}, {"params": params[cut:]}]


def build(difference: str) -> None:
    """Build a runtime and an optimizer; rank ODD does one thing differently."""
    import os

    odd = difference if int(os.environ["RANK"]) == ODD else ""
    runtime: dict[str, Any] = {"partitioner": "greedy", "schedule": "sync", "timeout": 8.0}
    runtime |= {
        "partitioner": {"partitioner": "flat"},
        "partitioner options": {"partitioner": {"name": "greedy", "cost": "bytes"}},
        "backend": {"backend": "reference"},
        "bucket_mb": {"bucket_mb": 1.0},
        "timeout": {"timeout": 9.0},
        "plugins": {"plugins": [Extra()]},
        "unknown plugin": {"partitioner": "gredy"},
    }.get(odd, {})
    if difference == "unstable partitioner":
        runtime["partitioner"] = Unstable()
    if odd == "version":
        shardrt.__version__ = "9.9.9"
    try:
        rt = shardrt.Runtime(**runtime)
    finally:
        shardrt.__version__ = _VERSION
    options: dict[str, Any] = {"lr": 1e-3}
    options |= {"defaults": {"lr": 2e-3}, "gradients": {"gradients": "sum"}}.get(odd, {})
    optimizer = Other if odd == "optimizer class" else torch.optim.AdamW
    opt = rt.optimizer([] if odd == "no parameters" else _groups(odd), optimizer, **options)
    opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(3 if odd == "added group" else 2))]})
    if difference == "initial values":
        values = torch.full((2,), float(bool(odd)))
        rt.optimizer([torch.nn.Parameter(values)], torch.optim.SGD, initial="check", lr=0.1)


_VERSION = shardrt.__version__
EXPECTED = {
    "partitioner": "on partitioner['name']: rank 1 has 'flat', rank 0 has 'greedy'",
    "partitioner options": "on partitioner['cost']: rank 1 has 'bytes', rank 0 has nothing",
    "backend": "on backend['name']: rank 1 has 'reference', rank 0 has 'auto'",
    "bucket_mb": "on bucket_mb: rank 1 has 1.0, rank 0 has None",
    "timeout": "on timeout: rank 1 has 9.0, rank 0 has 8.0",
    "plugins": "on plugins['Extra']: rank 1 has 'in process",
    "version": "on shardrt version: rank 1 has '9.9.9', rank 0 has ",
    "names": "on parameter names[2]: rank 1 has 'x', rank 0 has 'c'",
    "count": "on parameter names[2]: rank 1 has nothing, rank 0 has 'c'",
    "order": "on parameter order[0]: rank 1 has 'b', rank 0 has 'a'",
    "shapes": "on parameter shapes['a'][0]: rank 1 has 5, rank 0 has 3",
    "dtypes": "on parameter dtypes['a']: rank 1 has 'float64', rank 0 has 'float32'",
    "trained": "on trained parameters['a']: rank 1 has False, rank 0 has True",
    "groups": "on parameter groups['b']: rank 1 has 0, rank 0 has 1",
    "group options": "on group options[0]['lr']: rank 1 has 0.5, rank 0 has 0.1",
    "defaults": "on optimizer defaults['lr']: rank 1 has 0.002, rank 0 has 0.001",
    "optimizer class": "on optimizer class: rank 1 has 'tests.ranks.test_handshake.Other', rank 0 has 'torch",
    "gradients": "on gradients: rank 1 has 'sum', rank 0 has 'average'",
    "added group": "on parameter shapes['param.3'][0]: rank 1 has 3, rank 0 has 2",
    "unstable partitioner": "on plan: rank 1 has ",
    "initial values": "on digest of initial parameters['param.0']: rank 1 has ",
}


@pytest.mark.parametrize("difference", EXPECTED)
def test_every_rank_raises_the_same_difference(ranks: RankPool, difference: str) -> None:
    outcomes = _outcomes(ranks, difference)
    assert {outcome.error_type for outcome in outcomes} == {"HandshakeError"}, outcomes
    assert len({outcome.error_message for outcome in outcomes}) == 1, outcomes
    message = outcomes[0].error_message
    assert EXPECTED[difference] in message
    assert "; fix: " in message


@pytest.mark.parametrize(
    ("difference", "kind", "text"),
    [
        ("unknown plugin", "UnknownPluginError", "unknown partitioner 'gredy'"),
        ("no parameters", "ConfigError", "the optimizer got an empty parameter list"),
    ],
)
def test_an_error_on_one_rank_reaches_the_others(ranks: RankPool, difference: str, kind: str, text: str) -> None:
    outcomes = _outcomes(ranks, difference)
    assert outcomes[ODD].error_type == kind and text in outcomes[ODD].error_message
    for outcome in outcomes:
        if outcome.rank != ODD:
            assert outcome.error_type == "PeerError"
            assert f"because rank {ODD} failed: {kind}: " in outcome.error_message
            assert text in outcome.error_message


def _outcomes(ranks: RankPool, difference: str) -> list[Outcome]:
    started = time.monotonic()
    outcomes = ranks.outcomes(build, ranks=3, timeout=30, difference=difference)
    for outcome in outcomes:
        assert outcome.seconds < 10
    assert time.monotonic() - started < 60
    return outcomes


def no_difference() -> str:
    build("nothing at all")
    return "built"


def test_equal_ranks_agree(ranks: RankPool) -> None:
    assert ranks.run(no_difference, ranks=3) == ["built"] * 3


def one_rank_stays_away(who: int) -> None:
    import os

    rt = shardrt.Runtime(timeout=2.0)
    if int(os.environ["RANK"]) == who:
        time.sleep(4)
        return
    rt.optimizer([torch.nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("who", [0, 2])
def test_a_missing_rank_is_named(ranks: RankPool, who: int) -> None:
    outcomes = ranks.outcomes(one_rank_stays_away, ranks=3, timeout=40, who=who)
    for outcome in outcomes:
        if outcome.rank != who:
            assert outcome.error_type == "CommunicationError"
            assert f"at 'optimizer' for rank {who} of 3" in outcome.error_message


def different_calls() -> None:
    import os

    rt = shardrt.Runtime(timeout=5.0)
    param = torch.nn.Parameter(torch.ones(2))
    opt = rt.optimizer([param], torch.optim.SGD, lr=0.1)
    if int(os.environ["RANK"]) == 1:
        rt.optimizer([torch.nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=0.1)
    else:
        opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


def test_ranks_that_make_different_calls_are_told(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(different_calls, ranks=3, timeout=30):
        assert outcome.error_type == "HandshakeError"
        assert "rank 0 is at 'add_param_group', rank 1 is at 'optimizer'" in outcome.error_message

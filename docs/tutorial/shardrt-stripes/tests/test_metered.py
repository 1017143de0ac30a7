"""The backend passes shardrt's conformance kit, and meters what it runs."""

from __future__ import annotations

import pytest
import torch
from shardrt_stripes import metered

import shardrt
from shardrt.protocols import Communicator, Group
from shardrt.testing import BackendConformance, RankPool

GLOO = metered.wrapped()  # looked up once: the kit makes some thousand communicators


class TestMetered(BackendConformance):
    name = "metered"

    @classmethod
    def make(cls, group: Group) -> Communicator:
        return metered.MeteredCommunicator(group, GLOO.factory(group))


def train() -> str:
    """Two steps, on every rank; tells the backend's name."""
    weight = torch.nn.Parameter(torch.ones(10))
    with shardrt.Runtime(partitioner={"name": "stripes", "size": 4}, backend="metered", timeout=30) as rt:
        opt = rt.optimizer([weight], torch.optim.SGD, lr=0.5)
        for _ in range(2):
            opt.zero_grad()
            (weight.sum() * rt.rank).backward()
            opt.step()
        return f"{rt.backend} {weight.tolist()}"


def test_latencies_are_logged_when_it_is_closed(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(train, ranks=2, env={"SHARDRT_LOG": "info", "SHARDRT_LOG_FORMAT": "json"}):
        assert outcome.value == f"metered {[0.5] * 10}", outcome
        assert '"operation": "reduce_scatter", "operations": 2, "seconds": 0.' in outcome.output


def test_auto_never_takes_it(ranks: RankPool) -> None:
    reasons = ranks.run(why_not, ranks=2)
    assert all("metered not considered: only taken by name" in reason for reason in reasons)


def why_not() -> str:
    with shardrt.Runtime(timeout=30) as rt:
        return rt.backend_reason


def test_it_is_unavailable_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDRT_PLUGINS", "metered,stripes")
    answer = metered.probe()
    assert not answer.ok
    assert "unknown backend 'gloo'" in answer.reason
    assert "SHARDRT_PLUGINS" in answer.fix

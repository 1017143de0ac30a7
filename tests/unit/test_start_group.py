"""A process group that cannot be started: an error of ours, with the rank and what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from shardrt.comm.membership import start_group
from shardrt.errors import CommunicationError


def test_a_rank_that_does_not_come_is_told_as_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_peer(*args: Any, **options: Any) -> None:
        raise dist.DistStoreError("wait timeout after 8000ms, keys: /cpu//0/2")

    monkeypatch.setattr(dist, "init_process_group", no_peer)
    control = SimpleNamespace(number=1)
    membership: Any = SimpleNamespace(rank=0, world_size=3, store=dist.HashStore(), control=control)
    record: Any = SimpleNamespace(process_group="gloo", prepare=None)
    with pytest.raises(CommunicationError, match="rank 0: starting a gloo process group of 3 ranks failed"):
        start_group(membership, record, timeout=1.0)

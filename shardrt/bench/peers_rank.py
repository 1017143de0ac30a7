"""One rank of ``shardrt bench peers``. Started by :mod:`shardrt.launch`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from shardrt.bench.contest import PEERS
from shardrt.bench.peers import PeersSettings
from shardrt.demo.rank import Report, run_rank

if TYPE_CHECKING:
    import torch

    from shardrt.bench.contest_rank import Trainer


def work(settings: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Measure all contestants."""
    from shardrt.bench.contest_rank import Wire, run_rounds, training

    with training(PeersSettings(**settings), report) as shared:
        return run_rounds(shared, _make_trainer, Wire(device="lo", both_ways=False))


def _make_trainer(name: str, model: torch.nn.Module, cleanup: ExitStack) -> Trainer:
    import torch

    import shardrt
    from shardrt.bench.contest_rank import LR, Trainer, make_peer

    if name in PEERS:
        return make_peer(name, model)
    under_ddp = name == "shardrt_under_ddp"
    trained = torch.nn.parallel.DistributedDataParallel(model) if under_ddp else model
    # Gloo by name: a faster backend of ours for one machine would not be a comparison of ZeRO-1.
    rt = cleanup.enter_context(
        shardrt.Runtime(partitioner="flat" if name == "shardrt_flat" else "greedy", backend="gloo", device="cpu")
    )
    ours = rt.optimizer(
        trained.named_parameters(), torch.optim.AdamW, gradients="reduced" if under_ddp else "average", lr=LR
    )
    return Trainer(model=trained, optimizer=ours, state_bytes=ours.state_bytes)


if __name__ == "__main__":
    run_rank(work)

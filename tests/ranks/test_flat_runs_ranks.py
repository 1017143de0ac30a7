"""Training with shards stepped as one, and one by one, gives the same bits; so do checkpoints from one to the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardrt
from shardrt.optim import flattening
from shardrt.optim.sharded import ShardedOptimizer
from shardrt.testing import RankPool


class Small(torch.nn.Module):
    """Many small parameters, among them one that is frozen later and one that only odd steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(6))
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.sometimes = torch.nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x + self.sometimes if odd else x


def _train(
    longest: int, schedule: str, partitioner: str, loaded: str | None, saved: str, steps: range, joined: list[int]
) -> dict[str, torch.Tensor]:
    flattening.LONGEST = longest
    torch.manual_seed(0)
    model = Small()
    with shardrt.Runtime(schedule=schedule, partitioner=partitioner, timeout=30) as rt:
        named = dict(model.named_parameters())
        groups = [
            {"params": [(n, p) for n, p in named.items() if n < "layers.3"], "weight_decay": 0.1},
            {"params": [(n, p) for n, p in named.items() if n >= "layers.3"], "lr": 0.02},
        ]
        opt = rt.optimizer(groups, torch.optim.AdamW, lr=0.01)
        assert isinstance(opt, ShardedOptimizer) and opt._local._flat is not None
        if loaded is not None:
            rt.load(loaded, model=model, optimizer=opt)
        for step in steps:
            model.layers[1].requires_grad_(step % 5 != 3)
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rt.rank))
            model(x, odd=step % 2 == 1).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
            runs = sum(len(layout.runs) for layout in opt._local._flat._layouts.values())
            assert longest or not runs
            joined.append(runs)
        rt.save(saved, model=model, optimizer=opt)
        state = rt.full_state_dict(opt)["state"]
        found = {f"{key} {name}": value for key, entry in state.items() for name, value in entry.items()}
        return {**found, **{name: param.detach().clone() for name, param in model.named_parameters()}}


def _there_and_back(folder: str, schedule: str, partitioner: str) -> tuple[list[str], list[int]]:
    """Names of what differs between runs of which none, all or either half is stepped flat; and how many runs of shards
    there were after each step."""
    joined: list[int] = []
    kinds = {"flat": 1 << 16, "loose": 0}
    try:
        ends = {}
        for first, longest in kinds.items():
            at = f"{folder}/{first}"
            _train(longest, schedule, partitioner, None, at, range(6), joined)
            for second, then in kinds.items():
                ends[first, second] = _train(then, schedule, partitioner, at, f"{at}-{second}", range(6, 11), joined)
    finally:
        flattening.LONGEST = kinds["flat"]
    expected = ends["loose", "loose"]
    different = [
        f"{pair}: {name}"
        for pair, found in ends.items()
        for name in expected.keys() | found.keys()
        if not torch.equal(torch.as_tensor(expected[name]), torch.as_tensor(found[name]))
    ]
    return different, joined


@pytest.mark.parametrize(
    ("world_size", "schedule", "partitioner"),
    [(2, "sync", "greedy"), (2, "bucket", "flat"), (3, "interleaved", "greedy")],
)
def test_equals_steps_one_by_one(
    ranks: RankPool, tmp_path: Path, world_size: int, schedule: str, partitioner: str
) -> None:
    found = ranks.run(
        _there_and_back, ranks=world_size, folder=str(tmp_path), schedule=schedule, partitioner=partitioner
    )
    assert [different for different, _ in found] == [[]] * world_size
    assert any(any(joined) for _, joined in found), found

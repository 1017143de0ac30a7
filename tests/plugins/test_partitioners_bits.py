"""An elementwise optimizer that steps slices must end with the bits it would have on whole parameters.

See the note on alignment in shardrt/plan/cuts.py, and docs/partitioners.md for what was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from shardrt_bucket.partitioner import BucketPartitioner
from shardrt_flat.partitioner import FlatPartitioner

from shardrt import ParamSpec, PartitionRequest
from shardrt.protocols import Partitioner

NUMEL = 10_007
STEPS = 20
ODD_CUTS = (3, 1001, 5003)

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "centered": True}),
    "adadelta": (torch.optim.Adadelta, {}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-3}),
    "radam": (torch.optim.RAdam, {"lr": 1e-3}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-3}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-2}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-3}),
}
FUSED = ("sgd", "adam", "adamw", "adagrad")
CASES = [
    (name, mode) for name in OPTIMIZERS for mode in ("single", "foreach", "fused") if mode != "fused" or name in FUSED
]
MODES = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads(one_thread: None) -> None:
    torch.set_num_threads(2)


def train(name: str, mode: str, dtype: torch.dtype, cuts: Sequence[int] = ()) -> torch.Tensor:
    """One parameter after some steps, each of its slices an optimizer parameter of its own."""
    optimizer_class, options = OPTIMIZERS[name]
    generator = torch.Generator().manual_seed(0)
    ranges = list(pairwise([0, *cuts, NUMEL]))
    initial = torch.randn(NUMEL, generator=generator).to(dtype)
    slices = [torch.nn.Parameter(initial[start:stop].clone()) for start, stop in ranges]
    optimizer = optimizer_class(slices, **options, **MODES[mode])
    for _ in range(STEPS):
        gradient = torch.randn(NUMEL, generator=generator).to(dtype)
        for piece, (start, stop) in zip(slices, ranges, strict=True):
            piece.grad = gradient[start:stop].clone()
        optimizer.step()
    return torch.cat([piece.detach() for piece in slices])


def cuts_of(partitioner: Partitioner, dtype: torch.dtype, ranks: int) -> list[int]:
    spec = ParamSpec(name="w", shape=(NUMEL,), dtype=str(dtype).removeprefix("torch."))
    shards = partitioner.partition(PartitionRequest(params=(spec,), world_size=ranks)).shards
    return [shard.start for shard in shards[1:]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_the_cuts_of_flat_keep_every_bit(name: str, mode: str, dtype: torch.dtype) -> None:
    cuts = cuts_of(FlatPartitioner(), dtype, ranks=7)
    assert len(cuts) == 6
    assert torch.equal(train(name, mode, dtype, cuts), train(name, mode, dtype))


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_the_cuts_of_bucket_keep_every_bit_on_two_threads(name: str, mode: str, two_threads: None) -> None:
    cuts = cuts_of(BucketPartitioner(), torch.float32, ranks=5)
    assert len(cuts) == 4
    assert torch.equal(train(name, mode, torch.float32, cuts), train(name, mode, torch.float32))


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_cuts_anywhere_keep_all_but_the_last_bits_of_a_remainder(name: str, mode: str) -> None:
    """What ``align=1`` costs: at most the few elements that do not fill a block at the end of a slice."""
    whole = train(name, mode, torch.float32)
    sliced = train(name, mode, torch.float32, ODD_CUTS)
    torch.testing.assert_close(sliced, whole, rtol=1e-5, atol=1e-6)
    different = (sliced != whole).sum().item()
    assert different <= (len(ODD_CUTS) + 2) * 64

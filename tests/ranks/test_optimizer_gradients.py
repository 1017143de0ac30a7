"""Where gradients come from: DDP, the optimizer itself, both; clipping; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import shardrt
from shardrt.testing import RankPool
from tests.ranks.twins import Odd, average_backward, batch, largest_difference, twins


def under_ddp(partitioner: str, gradients: str, bucket_view: bool) -> list[float]:
    """DDP with the plain optimizer beside DDP with a sharded one."""
    ours, theirs = twins(lambda: Odd(matrices_only=True))
    with shardrt.Runtime(partitioner=partitioner, timeout=20) as rt:
        model = DistributedDataParallel(ours, gradient_as_bucket_view=bucket_view)
        twin = DistributedDataParallel(theirs, gradient_as_bucket_view=bucket_view)
        opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, gradients=gradients, lr=1e-2)
        plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        norms = []
        for step in range(6):
            for each, optimizer in ((model, opt), (twin, plain)):
                each(batch(step, rt.rank)).pow(2).mean().backward()
                if step == 3:
                    norms.append(
                        rt.clip_grad_norm_(each, 0.01)
                        if each is model
                        else torch.nn.utils.clip_grad_norm_(each.parameters(), 0.01)
                    )
                optimizer.step()
                optimizer.zero_grad()
        return [largest_difference(ours.parameters(), theirs.parameters()), abs(float(norms[0] - norms[1]))]


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("gradients", ["reduced", "average"])
@pytest.mark.parametrize("partitioner", ["greedy", "flat"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_plain_ddp_model(
    ranks: RankPool, world_size: int, partitioner: str, gradients: str, bucket_view: bool
) -> None:
    for difference, norm_difference in ranks.run(
        under_ddp, ranks=world_size, partitioner=partitioner, gradients=gradients, bucket_view=bucket_view
    ):
        assert difference <= 2e-6
        assert norm_difference <= 1e-6


def summed() -> float:
    model, twin = twins(Odd)
    with shardrt.Runtime(timeout=20) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, gradients="sum", lr=1e-2)
        plain = torch.optim.SGD(twin.parameters(), lr=2e-2)
        for step in range(4):
            average_backward(twin, lambda rank: twin(batch(step, rank)).pow(2).mean(), rt.world_size)  # noqa: B023
            model(batch(step, rt.rank)).pow(2).mean().backward()
            for optimizer in (opt, plain):
                optimizer.step()
                optimizer.zero_grad()
    return largest_difference(model.parameters(), twin.parameters())


def test_gradients_can_be_summed(ranks: RankPool) -> None:
    assert ranks.run(summed, ranks=2) == [0.0, 0.0]


class Conjugated(torch.nn.Module):
    """The gradient of a parameter that is read through ``conj`` is a view that has yet to be conjugated."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(numel, dtype=torch.complex64))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return (self.weight.conj() * (scale * (1 + 2j))).sum().abs()


def unusual_gradients(numel: int, backend: str, schedule: str) -> list[float]:
    """Conjugate views, and gradients set by hand that show one element many times or serve two parameters."""
    found = []
    with shardrt.Runtime(partitioner="flat", backend=backend, schedule=schedule, timeout=20) as rt:
        model, twin = twins(lambda: Conjugated(numel))
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=1e-2)
        plain = torch.optim.SGD(twin.parameters(), lr=1e-2)
        for step in range(3):
            model(torch.tensor(float(1 + rt.rank + step))).backward()
            average_backward(twin, lambda rank: twin(torch.tensor(float(1 + rank + step))), rt.world_size)  # noqa: B023
            for optimizer in (opt, plain):
                optimizer.step()
                optimizer.zero_grad()
        found.append(largest_difference(model.parameters(), twin.parameters()))
    if schedule == "sync":
        with shardrt.Runtime(partitioner="flat", backend=backend, timeout=20) as rt:
            params = {name: torch.nn.Parameter(torch.zeros(numel)) for name in ("first", "second")}
            opt = rt.optimizer(list(params.items()), torch.optim.SGD, lr=1.0)
            shared = torch.full((1,), float(rt.rank + 1)).expand(numel)
            for param in params.values():
                param.grad = shared
            opt.engine.scale_local_gradients(torch.tensor(2.0))
            opt.step()
            average = 2.0 * (rt.world_size + 1) / 2
            found += [(param.detach() + average).abs().max().item() for param in params.values()]
    return found


@pytest.mark.parametrize("numel", [50, 80_000], ids=["small", "large"])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("schedule", ["sync", "priority"])
def test_gradients_of_unusual_layout(ranks: RankPool, numel: int, backend: str, schedule: str) -> None:
    for found in ranks.run(unusual_gradients, ranks=2, numel=numel, backend=backend, schedule=schedule):
        assert max(found) == 0.0


def clipping(partitioner: str, norm_type: float, by_module: bool) -> list[float]:
    model, twin = twins(Odd)
    worst = 0.0
    with shardrt.Runtime(partitioner=partitioner, timeout=20) as rt:
        first = [(n, p) for n, p in model.named_parameters() if n.startswith("embed")]
        rest = [(n, p) for n, p in model.named_parameters() if not n.startswith("embed")]
        split = [first, rest] if by_module else [[*first, *rest]]
        ours = [rt.optimizer(some, torch.optim.AdamW, lr=1e-2) for some in split]
        plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        for step in range(6):
            average_backward(twin, lambda rank: twin(batch(step, rank)).pow(2).mean(), rt.world_size)  # noqa: B023
            model(batch(step, rt.rank)).pow(2).mean().backward()
            target = model if by_module else ours[0]
            norm = rt.clip_grad_norm_(target, 0.05, norm_type=norm_type)
            worst = max(worst, abs(float(norm - torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05, norm_type))))
            for optimizer in (*ours, plain):
                optimizer.step()
                optimizer.zero_grad()
    return [largest_difference(model.parameters(), twin.parameters()), worst]


@pytest.mark.parametrize("by_module", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("partitioner", ["greedy", "flat"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_clipping_by_the_norm_of_the_whole_model(
    ranks: RankPool, world_size: int, partitioner: str, norm_type: float, by_module: bool
) -> None:
    for difference, norm_difference in ranks.run(
        clipping, ranks=world_size, partitioner=partitioner, norm_type=norm_type, by_module=by_module
    ):
        assert norm_difference <= 1e-6
        assert difference <= 1e-5


def clip_infinite() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    with shardrt.Runtime(timeout=10) as rt:
        opt = rt.optimizer([param], torch.optim.SGD, lr=0.1)
        param.grad = torch.full((3,), float("nan") if rt.rank == 1 else 1.0)
        rt.clip_grad_norm_(opt, 1.0, error_if_nonfinite=True)


def test_a_norm_that_is_not_finite_raises_everywhere_if_asked(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(clip_infinite, ranks=2):
        assert outcome.error_type == "OptimizerError" and "over all ranks is nan" in outcome.error_message


def said_reduced_but_was_not() -> None:
    model = Odd()
    with shardrt.Runtime(timeout=10) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, gradients="reduced", lr=0.1)
        model(batch(0, rt.rank)).sum().backward()
        opt.step()


def test_a_wrong_statement_about_gradients_is_found_at_the_first_step(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(said_reduced_but_was_not, ranks=3):
        assert outcome.error_type == "HandshakeError"
        assert "digest of gradients said to be reduced['scale']" in outcome.error_message
        assert "pass gradients='average'" in outcome.error_message


def starting_values(initial: str) -> list[float]:
    torch.manual_seed(int(torch.distributed.get_rank()))
    model = Odd()
    with shardrt.Runtime(timeout=10) as rt:
        rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1, initial=initial)
    torch.manual_seed(0)
    return [largest_difference(model.parameters(), Odd().parameters())]


def test_different_starting_values_become_those_of_rank_0(ranks: RankPool) -> None:
    assert ranks.run(starting_values, ranks=3, initial="broadcast") == [[0.0]] * 3


def test_different_starting_values_can_be_refused(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(starting_values, ranks=3, initial="check"):
        assert outcome.error_type == "HandshakeError"
        assert "initial='broadcast'" in outcome.error_message


def refused(what: str) -> None:
    optimizer: Any = torch.optim.SGD
    defaults: dict[str, Any] = {"lr": 0.1}
    module: torch.nn.Module = torch.nn.Embedding(5, 3, sparse=what == "sparse gradient")
    if what == "SparseAdam":
        optimizer = torch.optim.SparseAdam
    if what == "LBFGS":
        optimizer = torch.optim.LBFGS
    if what == "aliases":
        module.other = torch.nn.Parameter(module.weight.data[1:3])
    if what == "sparse parameter":
        module.sparse = torch.nn.Parameter(torch.eye(3).to_sparse())
    if what == "meta":
        module = module.to("meta")
    with shardrt.Runtime(timeout=10) as rt:
        opt = rt.optimizer(module.named_parameters(), optimizer, **defaults)
        if what == "dtype changed":
            module.double()
        module(torch.tensor([1, 2])).sum().backward()
        if what == "backward after clipping":
            rt.clip_grad_norm_(opt, 1.0)
            module(torch.tensor([1, 2])).sum().backward()
        opt.step()


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("sparse gradient", "SparseGradientError", "parameter 'weight' received a gradient with layout"),
        ("SparseAdam", "UnsupportedError", "SparseAdam updates from sparse gradients"),
        ("LBFGS", "UnsupportedError", "LBFGS computes each update from the whole model"),
        ("aliases", "UnsupportedError", "'weight' and 'other' are different objects that share memory"),
        ("sparse parameter", "UnsupportedError", "parameter 'sparse' has layout torch.sparse_coo"),
        ("meta", "UnsupportedError", "parameter 'weight' is on the meta device"),
        ("dtype changed", "OptimizerError", "was torch.float32 [5, 3] on cpu when the optimizer was built"),
        ("backward after clipping", "OptimizerError", "gradients were changed or accumulated after their reduction"),
    ],
)
def test_what_cannot_be_right_is_refused_on_every_rank(ranks: RankPool, what: str, kind: str, text: str) -> None:
    for outcome in ranks.outcomes(refused, ranks=2, what=what):
        assert outcome.error_type == kind, outcome
        assert text in outcome.error_message


class Notes:
    """An observer that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    @shardrt.hookimpl
    def shardrt_rank_failed(self, rank: int, error: str) -> None:
        self.heard.append([rank, error])


def fails_alone() -> None:
    model = Odd()
    notes = Notes()
    try:
        _fail_on_rank_1(model, notes)
    except Exception as error:
        raise type(error)(f"{error}; heard: {notes.heard}") from None


def _fail_on_rank_1(model: torch.nn.Module, notes: Notes) -> None:
    with shardrt.Runtime(timeout=20, plugins=[notes]) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
        model(batch(0, rt.rank)).sum().backward()
        if rt.rank == 1:
            raise RuntimeError("the data loader broke")
        opt.step()


def test_a_failure_between_steps_ends_the_waiting_of_the_others(ranks: RankPool) -> None:
    outcomes = ranks.outcomes(fails_alone, ranks=3)
    heard = "; heard: [[1, 'RuntimeError: the data loader broke']"
    assert outcomes[1].error_message.startswith(f"the data loader broke{heard}")
    for rank in (0, 2):
        assert heard in outcomes[rank].error_message
        assert outcomes[rank].error_type == "PeerError", outcomes[rank]
        assert "rank 1 failed: RuntimeError: the data loader broke" in outcomes[rank].error_message
        assert outcomes[rank].seconds < 10


def dies_alone() -> None:
    import os

    model = Odd()
    rt = shardrt.Runtime(timeout=20)
    opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
    model(batch(0, rt.rank)).sum().backward()
    if rt.rank == 1:
        os._exit(9)
    opt.step()


def test_a_rank_that_dies_ends_the_others_with_its_name(ranks: RankPool) -> None:
    outcomes = ranks.outcomes(dies_alone, ranks=3, grace=25)
    for rank in (0, 2):
        assert outcomes[rank].error_type in ("CommunicationError", "PeerError"), outcomes[rank]
        assert "rank 1" in outcomes[rank].error_message
        assert outcomes[rank].seconds < 20

"""The two runs that the demo compares, as one rank sees them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn

import shardrt
from shardrt.demo.model import CONTEXT, ByteTransformer
from shardrt.demo.recipes import build_optimizers, plain
from shardrt.demo.settings import DemoSettings
from shardrt.demo.text import Corpus

OnStep = Callable[[int, float], None]


@attrs.frozen(kw_only=True)
class Run:
    """What one rank brings home from one run."""

    losses: list[float]
    """This rank's own, one per step."""
    step_seconds: list[float]
    optimizer_bytes: int
    sent: int = 0
    received: int = 0
    backend: str = ""
    backend_reason: str = ""
    owned_bytes: list[int] = attrs.field(factory=list)
    """Bytes of parameters that each rank owns, by the plans."""

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return attrs.asdict(self)


def train_sharded(settings: DemoSettings, corpus: Corpus, rank: int, on_step: OnStep) -> tuple[Run, nn.Module]:
    """The model and the loop as they are; ``rt.optimizer`` reduces, steps its share and gathers."""
    model = _fresh_model(settings)
    with shardrt.Runtime(
        partitioner=settings.partitioner,
        backend=settings.backend,
        schedule=settings.schedule,
        bucket_mb=settings.bucket_mb,
        device="cpu",
    ) as rt:
        optimizers = build_optimizers(model, settings.optimizer, rt.optimizer)
        before = rt.traffic.copy()
        losses, seconds = _train(model, optimizers, settings, corpus, rank, on_step)
        moved = rt.traffic - before
        owned = [sum(shares) for shares in zip(*(opt.plan.bytes_per_rank for opt in optimizers), strict=True)]
        run = Run(
            losses=losses,
            step_seconds=seconds,
            optimizer_bytes=sum(optimizer.state_bytes() for optimizer in optimizers),
            sent=moved.sent,
            received=moved.received,
            backend=rt.backend,
            backend_reason=rt.backend_reason,
            owned_bytes=owned,
        )
    return run, model


def train_unsharded(settings: DemoSettings, corpus: Corpus, rank: int, on_step: OnStep) -> tuple[Run, nn.Module]:
    """The same with DistributedDataParallel and the plain optimizer; on one rank with the plain optimizer alone."""
    model = _fresh_model(settings)
    trained: nn.Module = model
    if settings.ranks > 1:
        dist.init_process_group("gloo")
        trained = nn.parallel.DistributedDataParallel(model)
    try:
        optimizers = build_optimizers(model, settings.optimizer, plain)
        losses, seconds = _train(trained, optimizers, settings, corpus, rank, on_step)
    finally:
        if settings.ranks > 1:
            dist.destroy_process_group()
    return Run(losses=losses, step_seconds=seconds, optimizer_bytes=state_bytes(optimizers)), model


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between parameters of two models; not a number counts as infinite."""
    differences = [
        (mine.detach() - theirs.detach()).abs().nan_to_num(nan=float("inf")).max().item()
        for mine, theirs in zip(one.parameters(), other.parameters(), strict=True)
    ]
    return max(differences)


def digest_of(model: nn.Module) -> str:
    """A few characters that are the same for the same bits in the same parameters."""
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def state_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Bytes of tensors that plain optimizers keep."""
    return sum(
        value.numel() * value.element_size()
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def _fresh_model(settings: DemoSettings) -> ByteTransformer:
    torch.manual_seed(settings.seed)
    return ByteTransformer()


def _train(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    settings: DemoSettings,
    corpus: Corpus,
    rank: int,
    on_step: OnStep,
) -> tuple[list[float], list[float]]:
    losses, seconds = [], []
    for step in range(settings.steps):
        windows = corpus.windows(seed=settings.seed, step=step, rank=rank, count=settings.batch, length=CONTEXT + 1)
        started = time.perf_counter()
        loss = model(windows)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
        on_step(step + 1, losses[-1])
    return losses, seconds

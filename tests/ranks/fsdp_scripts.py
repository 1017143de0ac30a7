"""What scripts written for torch's FSDP do, with our import, each beside the same loop on the unsharded twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shardrt.compat import FullyShardedDataParallel
from tests.ranks.sharded_scenarios import Net
from tests.ranks.twins import average_backward, batch, largest_difference, twins


def wrapped(model: torch.nn.Module, strategy: str = "FULL_SHARD", **options: Any) -> FullyShardedDataParallel:
    """As scripts wrap."""
    policy = ModuleWrapPolicy({torch.nn.Sequential})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, sharding_strategy=ShardingStrategy[strategy], **options
    )


class Script:
    """Both twins, each with its own optimizer of torch's."""

    def __init__(self, wrap: Callable[[torch.nn.Module], torch.nn.Module], **options: Any) -> None:
        optimizer = options.pop("optimizer", torch.optim.AdamW)
        options = options or {"lr": 1e-2}
        build = options.pop("build", Net)
        model, self.twin = twins(build)
        self.model = wrap(model)
        self.opt = optimizer(self.model.parameters(), **options)
        self.plain = optimizer(self.twin.parameters(), **options)

    def backward(self, step: int) -> None:
        """Of both."""
        average_backward(self.twin, lambda rank: self.twin(batch(step, rank)).pow(2).mean(), dist.get_world_size())
        self.model(batch(step, dist.get_rank())).pow(2).mean().backward()

    def step(self) -> None:
        """Of both."""
        for optimizer in (self.opt, self.plain):
            optimizer.step()
            optimizer.zero_grad()

    def difference(self) -> float:
        """Between the twins, now."""
        state = self.model.state_dict()
        return largest_difference(
            [state[name] for name in self.twin.state_dict()], list(self.twin.state_dict().values())
        )


def plain_loop(script: Script) -> None:
    """As most scripts are."""
    for step in range(6):
        script.backward(step)
        script.step()


def zeroed_before_backward(script: Script) -> None:
    """zero_grad between forward and backward, and now and then not at all."""
    for step in range(6):
        average_backward_into(script, step, zero=step != 3)
        script.opt.step()
        script.plain.step()


def average_backward_into(script: Script, step: int, *, zero: bool) -> None:
    """zero_grad in the place where many write it."""
    loss = script.model(batch(step, dist.get_rank())).pow(2).mean()
    if zero:
        script.opt.zero_grad()
        script.plain.zero_grad()
    loss.backward()
    twin = script.twin
    average_backward(twin, lambda rank: twin(batch(step, rank)).pow(2).mean(), dist.get_world_size())


def accumulated(script: Script) -> None:
    """Three backwards before a step, two of them in no_sync in every second round."""
    for step in range(4):
        for part in range(3):
            if step % 2 and part < 2:
                with script.model.no_sync():  # type: ignore[operator]
                    script.backward(10 * step + part)
            else:
                script.backward(10 * step + part)
        script.step()


def clipped(script: Script, *, by_torch: bool) -> float:
    """By the module's method, or by torch's own function; returns the largest difference of norms."""
    worst = 0.0
    for step in range(6):
        script.backward(step)
        order = float("inf") if step == 4 else 2.0
        theirs = torch.nn.utils.clip_grad_norm_(script.twin.parameters(), 0.05, order)
        if by_torch:
            ours = torch.nn.utils.clip_grad_norm_(script.model.parameters(), 0.05, order)
        else:
            ours = script.model.clip_grad_norm_(0.05, order)  # type: ignore[operator]
        worst = max(worst, abs(float(ours) - float(theirs)))
        script.step()
    return worst


def scaled(script: Script) -> list[float]:
    """torch's GradScaler, with a step that overflows on one rank alone."""
    ours, theirs = (torch.amp.GradScaler("cpu", init_scale=2.0**6) for _ in range(2))
    for step in range(5):
        factor = float("inf") if step == 2 and dist.get_rank() == 0 else 1.0
        (ours.scale(script.model(batch(step, dist.get_rank())).pow(2).mean()) * factor).backward()
        everywhere = float("inf") if step == 2 else 1.0
        twin = script.twin
        average_backward(
            twin,
            lambda rank: theirs.scale(twin(batch(step, rank)).pow(2).mean()) * everywhere,  # noqa: B023
            dist.get_world_size(),
        )
        for scaler, optimizer in ((ours, script.opt), (theirs, script.plain)):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [ours.get_scale(), theirs.get_scale()]


def frozen_later(script: Script) -> None:
    """A block rests for some steps."""
    for step in range(8):
        if step in (2, 5):
            for model in (script.model, script.twin):
                for param in model.blocks[1].parameters():  # type: ignore[union-attr, index]
                    param.requires_grad_(step == 5)
        script.backward(step)
        script.step()


def evaluated(script: Script) -> float:
    """An evaluation after each step; returns the largest difference of outputs."""
    worst = 0.0
    for step in range(4):
        script.backward(step)
        script.step()
        with torch.no_grad():
            worst = max(worst, largest_difference([script.model(batch(50, 0))], [script.twin(batch(50, 0))]))
    return worst


LOOPS: dict[str, Callable[[Script], Any]] = {
    "plain": plain_loop,
    "zeroed before backward": zeroed_before_backward,
    "accumulated": accumulated,
    "clipped": lambda script: clipped(script, by_torch=False),
    "clipped by torch": lambda script: clipped(script, by_torch=True),
    "GradScaler": scaled,
    "frozen later": frozen_later,
    "evaluated": evaluated,
}


def run_loop(name: str, strategy: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """The difference between the twins after a loop, and what it returned."""
    script = Script(lambda model: wrapped(model, strategy, **(options or {})))
    returned = LOOPS[name](script)
    return {"difference": script.difference(), "returned": returned}

"""What training loops do with a sharded module, each beside the same loop on the unsharded twin.

The twin gets the gradients of all ranks' batches. A scenario returns the largest difference of any parameter, and
whatever else its test looks at.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import shardrt
from tests.ranks.twins import average_backward, batch, largest_difference, twins
from tests.ranks.zoo import Adapted, TiedTransformer


class Net(torch.nn.Module):
    """Blocks in a row; ``how`` says how they are called."""

    def __init__(self, how: str = "plainly") -> None:
        super().__init__()
        self.how = how
        self.inlet = torch.nn.Linear(7, 12)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(12, 23), torch.nn.Tanh(), torch.nn.Linear(23, 12)) for _ in range(3)
        )
        self.outlet = torch.nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            if self.how == "checkpointed":
                x = x + checkpoint(block, x, use_reentrant=False)
            elif self.how == "checkpointed in pairs":
                x = x + checkpoint(lambda y: self.blocks[1](self.blocks[0](y)), x, use_reentrant=False)
            else:
                x = x + block(x)
        return self.outlet(x)


@dataclasses.dataclass
class Answer:
    """What some models return."""

    hidden: torch.Tensor
    names: tuple[str, ...]


class Wrapping(torch.nn.Module):
    """Blocks that take and return more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(_Talking() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer = Answer(hidden=x, names=())
        for number, block in enumerate(self.blocks):
            answer = block(given=answer, name=str(number))
        return answer.hidden


class _Talking(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(7, 7)

    def forward(self, *, given: Answer, name: str) -> Answer:
        return Answer(hidden=torch.tanh(self.inner(given.hidden)), names=(*given.names, name))


class Loop:
    """Both twins with their optimizers."""

    def __init__(
        self, rt: shardrt.Runtime, strategy: str, build: Callable[[], torch.nn.Module] = Net, **options: Any
    ) -> None:
        self.rt = rt
        self.model, self.twin = twins(build)
        self.optimizer_class = options.pop("optimizer_class", torch.optim.AdamW)
        self.defaults = options.pop("defaults", {"lr": 1e-2})
        if rt.bucket_bytes is not None and rt.bucket_bytes < 1000:  # next to nothing travels together
            options.setdefault("divide_units", True)
        self.model, self.opt = rt.shard(self.model, self.optimizer_class, strategy=strategy, **options, **self.defaults)
        self.plain = self.optimizer_class([p for p in self.twin.parameters() if p.requires_grad], **self.defaults)

    def twin_backward(self, step: int, loss: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """Leave the average gradient in the twin, added to what is there."""
        made = loss or _loss
        average_backward(self.twin, lambda rank: made(self.twin(batch(step, rank))), self.rt.world_size)

    def backward(self, step: int, loss: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """The sharded module's own."""
        (loss or _loss)(self.model(batch(step, self.rt.rank))).backward()

    def step(self) -> None:
        """Update both."""
        self.plain.step()
        self.plain.zero_grad()
        self.opt.step()
        self.opt.zero_grad()

    def difference(self) -> float:
        """Between the twins, now."""
        with self.rt.summon_full_params(self.model):
            return largest_difference(self.model.parameters(), self.twin.parameters())


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.pow(2).mean()


def plain_steps(loop: Loop, steps: int = 6) -> None:
    """Nothing special."""
    for step in range(steps):
        loop.twin_backward(step)
        loop.backward(step)
        loop.step()


def clipping(loop: Loop) -> float:
    """By the norm of the whole gradient; returns the largest difference of norms."""
    worst = 0.0
    for step in range(6):
        loop.twin_backward(step)
        loop.backward(step)
        theirs = torch.nn.utils.clip_grad_norm_(loop.twin.parameters(), 0.05)
        ours = loop.rt.clip_grad_norm_(loop.model if step % 2 else loop.opt, 0.05)
        worst = max(worst, abs(float(ours) - float(theirs)))
        loop.step()
    return worst


def accumulation(loop: Loop, *, no_sync: bool) -> None:
    """Three backwards before each step."""
    for step in range(4):
        for part in range(3):
            loop.twin_backward(10 * step + part)
            if no_sync and part < 2:
                with loop.rt.no_sync(loop.opt):
                    loop.backward(10 * step + part)
            else:
                loop.backward(10 * step + part)
        loop.step()


def never_zeroed(loop: Loop) -> None:
    """Gradients add up over steps, as they do without sharding."""
    for step in range(4):
        loop.twin_backward(step)
        loop.backward(step)
        loop.plain.step()
        loop.opt.step()


def scaled(loop: Loop) -> list[float]:
    """With a GradScaler, one of whose steps overflows; returns its scales."""
    ours, theirs = torch.amp.GradScaler("cpu", init_scale=2.0**6), torch.amp.GradScaler("cpu", init_scale=2.0**6)
    for step in range(5):
        factor = float("inf") if step == 2 else 1.0
        loop.twin_backward(step, lambda output: theirs.scale(_loss(output) * factor))  # noqa: B023
        loop.backward(step, lambda output: ours.scale(_loss(output) * factor))  # noqa: B023
        theirs.step(loop.plain)
        theirs.update()
        ours.step(loop.opt)
        ours.update()
        loop.plain.zero_grad()
        loop.opt.zero_grad()
    return [ours.get_scale(), theirs.get_scale()]


def evaluated_between(loop: Loop) -> float:
    """An evaluation between forward and backward, and one between steps; returns the largest difference of outputs."""
    worst = 0.0
    for step in range(4):
        loop.twin_backward(step)
        loss = _loss(loop.model(batch(step, loop.rt.rank)))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                ours = loop.model(batch(50, 0))
            with torch.no_grad():
                worst = max(worst, largest_difference([ours.clone()], [loop.twin(batch(50, 0))]))
        loss.backward()
        loop.step()
    return worst


def several_forwards(loop: Loop) -> None:
    """Two forwards before one backward of their sum, and two before two backwards in the other order."""
    for step in range(4):
        for part in (0, 1):
            loop.twin_backward(10 * step + part)
        first = _loss(loop.model(batch(10 * step, loop.rt.rank)))
        second = _loss(loop.model(batch(10 * step + 1, loop.rt.rank)))
        if step % 2:
            (first + second).backward()
        else:
            second.backward()
            first.backward()
        loop.step()


def frozen_and_thawed(loop: Loop) -> None:
    """A block rests for some steps."""
    for step in range(9):
        if step in (2, 5):
            for model in (loop.model, loop.twin):
                for param in model.blocks[1].parameters():  # type: ignore[union-attr, index]
                    param.requires_grad_(step == 5)
        loop.twin_backward(step)
        loop.backward(step)
        loop.step()


class Layers(torch.nn.Module):
    """Units that freeze one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def frozen_in_turns(loop: Loop) -> None:
    """One layer rests after the other, for a step or two; then any of them, by chance."""
    dice = random.Random(0)
    turns: list[set[int]] = [{1}, {1}, {3}, set(), set(), {2}, {0}, {0}, {4}, set()]
    turns += [{layer for layer in range(5) if dice.random() < 0.4} - {dice.randrange(5)} for _ in range(12)]
    for step, resting in enumerate(turns):
        for model in (loop.model, loop.twin):
            for number, block in enumerate(model.blocks):  # type: ignore[arg-type, union-attr]
                block.requires_grad_(number not in resting)
        loop.twin_backward(step)
        loop.backward(step)
        loop.step()


def clipped_and_frozen(loop: Loop) -> float:
    """A block rests for some steps, and what is left is clipped, now and then twice."""
    worst = 0.0
    for step in range(9):
        if step in (0, 2, 5):
            for model in (loop.model, loop.twin):
                for param in model.blocks[1].parameters():  # type: ignore[union-attr, index]
                    param.requires_grad_(step == 2)
        loop.twin_backward(step)
        loop.backward(step)
        for limit in (0.05, 0.01)[: 1 + step % 2]:
            theirs = torch.nn.utils.clip_grad_norm_(loop.twin.parameters(), limit)
            ours = loop.rt.clip_grad_norm_(loop.model, limit)
            worst = max(worst, abs(float(ours) - float(theirs)))
        loop.step()
    return worst


SCENARIOS: dict[str, tuple[Callable[[Loop], Any], dict[str, Any]]] = {
    "plain": (plain_steps, {}),
    "clipping": (clipping, {}),
    "clipped and frozen": (
        clipped_and_frozen,
        {"optimizer_class": torch.optim.SGD, "defaults": {"lr": 0.5, "momentum": 0.9}},
    ),
    "accumulation": (lambda loop: accumulation(loop, no_sync=False), {}),
    "accumulation in no_sync": (lambda loop: accumulation(loop, no_sync=True), {}),
    "never zeroed": (never_zeroed, {}),
    "GradScaler": (scaled, {}),
    "evaluation between": (evaluated_between, {}),
    "several forwards": (several_forwards, {}),
    "frozen and thawed": (frozen_and_thawed, {}),
    "frozen in turns": (frozen_in_turns, {"build": Layers}),
    "checkpointed": (plain_steps, {"build": lambda: Net("checkpointed")}),
    "checkpointed in pairs": (plain_steps, {"build": lambda: Net("checkpointed in pairs")}),
    "keywords and dataclasses": (plain_steps, {"build": Wrapping}),
    "prefetch post": (plain_steps, {"prefetch": "post"}),
    "no prefetch": (plain_steps, {"prefetch": None}),
    "one unit": (plain_steps, {"units": lambda module: False}),
    "units by size": (plain_steps, {"units": 100}),
    "nested units": (plain_steps, {"units": (torch.nn.Linear, torch.nn.Sequential)}),
    "greedy": (plain_steps, {"partitioner": "greedy"}),
    "offload": (clipping, {"offload": True}),
    "momentum": (
        plain_steps,
        {"optimizer_class": torch.optim.SGD, "defaults": {"lr": 0.05, "momentum": 0.9}, "build": TiedTransformer},
    ),
    "adapters": (plain_steps, {"build": Adapted}),
}


def run_scenario(name: str, strategy: str, **runtime: Any) -> dict[str, Any]:
    """The difference between the twins after a scenario, and what it returned."""
    run, options = SCENARIOS[name]
    with shardrt.Runtime(timeout=30, **runtime) as rt:
        loop = Loop(rt, strategy, **options)
        returned = run(loop)
        return {"difference": loop.difference(), "returned": returned}

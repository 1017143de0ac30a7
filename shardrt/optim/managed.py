"""What the optimizers of a runtime have in common, on one rank or on many."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shardrt.errors import UnsupportedError
from shardrt.optim.planner import Planner
from shardrt.plan import Plan

if TYPE_CHECKING:
    from shardrt.runtime import Runtime


class ManagedOptimizer(torch.optim.Optimizer):
    """An optimizer that :meth:`shardrt.Runtime.optimizer` made.

    Example:
        >>> import shardrt, torch
        >>> model = torch.nn.Linear(4, 2)
        >>> with shardrt.Runtime() as rt:
        ...     opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        ...     model(torch.ones(1, 4)).sum().backward()
        ...     opt.step()
        >>> opt.plan.world_size, opt.state_bytes()
        (1, 40)
    """

    plan: Plan
    """What this optimizer's ranks have agreed on."""
    step_after_backward = False
    """Whether the step is made at the end of each synchronised backward under DDP, and not by the loop."""

    def _prepare(self, runtime: Runtime, planner: Planner, plan: Plan) -> None:
        self.plan = plan
        self._runtime = runtime
        self._planner = planner
        self._steps = 0
        self._observers: tuple[Callable[..., object], ...] = runtime.registry.lifecycle("shardrt_step_finished")

    def _finished(self, started: float) -> None:
        self._steps += 1
        if self._runtime.flight is not None:
            self._runtime.flight.step += 1
        if self._observers:
            seconds = time.perf_counter() - started
            for observe in self._observers:
                observe(runtime=self._runtime, step=self._steps, seconds=seconds)

    def _local_optimizer(self) -> torch.optim.Optimizer:
        """The user's class at work on this rank."""
        raise NotImplementedError

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this rank keeps."""
        return sum(
            value.numel() * value.element_size()
            for state in self._local_optimizer().state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )

    def reduced_gradients(self, wanted: set[torch.Tensor] | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """For clipping: this rank's part of the gradient, and what to scale on this rank.

        ``wanted`` restricts both to some of the parameters.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until every parameter has its new value; only a view made earlier can show that it has not."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: a copy would share this rank's buffers, or leave out what the other ranks hold."""
        raise UnsupportedError(
            f"a {type(self).__name__} cannot be copied or pickled: it is one rank's part of a whole, tied to its "
            "runtime; build another one with rt.optimizer"
        )

    def trained(self) -> set[torch.Tensor]:
        """The parameters of this optimizer."""
        return {param for group in self.param_groups for param in group["params"]}

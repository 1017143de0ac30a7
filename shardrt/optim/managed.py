"""What the optimizers of a runtime have in common, on one rank or on many."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shardrt.errors import UnsupportedError
from shardrt.optim.mesh import Mesh
from shardrt.optim.planner import Planner
from shardrt.optim.reach import Reach
from shardrt.plan import Plan, Shard

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
    mesh: Mesh | None = None
    """Which ranks have the same shards, where not all ranks share; None otherwise."""
    step_after_backward = False
    """Whether the step is made at the end of each synchronised backward under DDP, and not by the loop."""

    def _prepare(self, runtime: Runtime, planner: Planner, plan: Plan) -> None:
        self.plan = plan
        self._runtime = runtime
        self._planner = planner
        self._steps = 0
        self._steps_before = 0
        self._observers: tuple[Callable[..., object], ...] = runtime.registry.lifecycle("shardrt_step_finished")

    def _finished(self, started: float) -> None:
        self._steps += 1
        if self._runtime.flight is not None:
            self._runtime.flight.step += 1
        if self._observers:
            seconds = time.perf_counter() - started
            for observe in self._observers:
                observe(runtime=self._runtime, step=self.steps_taken, seconds=seconds)

    @property
    def steps_taken(self) -> int:
        """Updates made, those before the state was loaded included."""
        return self._steps_before + self._steps

    @steps_taken.setter
    def steps_taken(self, count: int) -> None:
        self._steps_before = count - self._steps

    def _local_optimizer(self) -> torch.optim.Optimizer:
        """The user's class at work on this rank."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The state in the form that :meth:`shardrt.Runtime.state_dict_type` has set: by default the whole of it, in
        torch's own format, which every rank must ask for alike."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        made = self._runtime.state_dict(self)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, made)
            made = made if changed is None else changed
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state in any of these forms; the one that is handed over is left as it is."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._runtime.load_state_dict(self, state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def named(self) -> dict[str, torch.Tensor]:
        """The whole parameters by their names, in order."""
        raise NotImplementedError

    def owned(self) -> list[tuple[Shard, torch.Tensor]]:
        """This rank's shards, each with the tensor that the user's class steps."""
        raise NotImplementedError

    def local_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """What the user's class keeps, by the tensors it steps."""
        return self._local_optimizer().state

    def replace_state(self, state: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Let the user's class go on from this state."""
        kept = self._local_optimizer().state
        kept.clear()
        kept.update(state)

    @property
    def answers(self) -> bool:
        """Whether this rank tells of its shards, or one of another group that has the same."""
        return self.mesh is None or self.mesh.is_first

    def rank_of(self, shard: Shard) -> int:
        """The rank that answers for a shard."""
        return shard.rank if self.mesh is None else self.mesh.answering(shard.rank)

    @property
    def replica_count(self) -> int:
        """How many ranks have each shard."""
        return 1 if self.mesh is None else len(self.mesh.groups)

    @property
    def is_elementwise(self) -> bool:
        """Whether the update of an element looks at that element alone."""
        return self._planner.reach is Reach.ELEMENT

    def check_between_steps(self, what: str) -> None:
        """Raise if an update is under way, whose state nobody could tell."""

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

    def spread_parameters(self) -> None:
        """The shards that are stepped have new values: let whole parameters follow. Every rank calls it."""

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

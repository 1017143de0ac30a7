"""The optimizer of a single rank: the user's own class with nothing in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardrt.optim.local import construct, step_without_global_hooks
from shardrt.optim.managed import ManagedOptimizer
from shardrt.optim.params import NamedGroup, NamedParam, read_groups
from shardrt.optim.planner import Planner
from shardrt.plan import Plan, Shard

if TYPE_CHECKING:
    from shardrt.runtime import Runtime


class LoneOptimizer(ManagedOptimizer):
    """What :meth:`shardrt.Runtime.optimizer` returns on one rank: same interface, no buckets, no communication.

    Groups and state are the inner optimizer's own objects, so there is nothing to keep in step.
    """

    def __init__(
        self,
        runtime: Runtime,
        planner: Planner,
        plan: Plan,
        groups: Sequence[NamedGroup],
        defaults: Mapping[str, Any],
    ) -> None:
        self._prepare(runtime, planner, plan)
        self._params: list[NamedParam] = [param for group in groups for param in group.params]
        self._inner = construct(planner.optimizer_class, [_unnamed(group) for group in groups], defaults)
        self._inner_step = step_without_global_hooks(self._inner)
        self._step_supports_amp_scaling = getattr(self._inner, "_step_supports_amp_scaling", False)
        self._set_up = False
        super().__init__([group.as_torch() for group in groups], dict(self._inner.defaults))
        self._set_up = True
        self._share()
        runtime.plan_built(plan)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The inner optimizer's step."""
        started = time.perf_counter() if self._observers else 0.0
        if hasattr(self, "found_inf"):  # torch.amp.GradScaler leaves its findings here for the step
            vars(self._inner).update(grad_scale=vars(self)["grad_scale"], found_inf=self.found_inf)
        result = self._inner_step() if closure is None else self._inner_step(closure)
        self._finished(started)
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take more parameters to train."""
        if not self._set_up:
            super().add_param_group(param_group)
            return
        [group] = read_groups([param_group], first_group=len(self.param_groups), taken=self._params)
        self.plan = self._planner.extended(self.plan, [param.spec() for param in group.params])
        self._inner.add_param_group(_unnamed(group))
        self._params += group.params
        self._runtime.plan_built(self.plan)

    def named(self) -> dict[str, torch.Tensor]:
        """The parameters by their names, in order."""
        return {param.name: param.tensor for param in self._params}

    def owned(self) -> list[tuple[Shard, torch.Tensor]]:
        """All parameters, whole."""
        return [(Shard(param.name, 0, param.tensor.numel(), 0), param.tensor) for param in self._params]

    def reduced_gradients(self, wanted: set[torch.Tensor] | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """There is one rank: its gradients are the whole."""
        tensors = (param.tensor for param in self._params)
        found = [t.grad for t in tensors if t.grad is not None and (wanted is None or t in wanted)]
        return found, found

    def _local_optimizer(self) -> torch.optim.Optimizer:
        return self._inner

    def _share(self) -> None:
        self.param_groups = self._inner.param_groups
        self.state = self._inner.state


def _unnamed(group: NamedGroup) -> dict[str, Any]:
    return {**group.options, "params": [param.tensor for param in group.params]}

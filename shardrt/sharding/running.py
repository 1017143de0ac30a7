"""Brings parameters before a unit computes and puts them away afterwards, forward and backward.

Note [When units come and go]: before a unit's forward its parameters are brought, after it they are put away. Its
outputs carry a hook that brings them again before its backward begins, its inputs one that puts them away when their
gradients are there, which is when nothing in the unit is left to compute. Inputs without gradients (the first layer's)
leave that to the end of backward. The root's parameters stay from the beginning of forward to the end of backward,
unless they are told to go between the two.
Inside backward a forward is a recomputation (activation checkpointing): what it brings stays for the gradients that
are computed next.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.utils import _pytree as pytree

from shardrt.errors import StateError
from shardrt.optim.backward import call_after_backward
from shardrt.optim.engine import BucketEngine
from shardrt.optim.sharded import ShardedOptimizer
from shardrt.protocols import Communicator
from shardrt.sharding.prefetching import Prefetch, RunningOrder
from shardrt.sharding.shown import ShownShards
from shardrt.sharding.unit_params import UnitParams
from shardrt.sharding.units import Unit

Direction = Literal["forward", "backward"]


class UnitRunner:
    """The hooks of one sharded module. See Note [When units come and go]."""

    def __init__(
        self,
        units: Sequence[Unit],
        optimizer: ShardedOptimizer,
        prefetch: Prefetch,
        *,
        keeps_after_forward: bool = False,
        nearby: Communicator | None = None,
        shown: ShownShards | None = None,
    ) -> None:
        """``keeps_after_forward``: units stay until their backward. ``nearby``: see Note [Kept nearby]. ``shown``: what
        the module's attributes are outside forward and backward, if not the whole parameters."""
        self._units = units
        self._prefetch = prefetch
        self._keeping = set(range(len(units) if keeps_after_forward else 1))
        self._staying: set[int] = set()
        self._told_ahead: dict[tuple[Direction, int], list[int]] = {}
        self._nearby = nearby
        self.shown = shown
        self._order = RunningOrder()
        self._depth = 0
        self._task: int | None = None
        self.params: list[UnitParams] = []
        self._optimizer = weakref.ref(optimizer)
        self._take_over(optimizer.engine)
        # Weak: the optimizer's hooks on parameters live as long as these.
        runner = weakref.ref(self)
        optimizer.followers.rebuilding = lambda: _with(runner, UnitRunner.put_all_away)
        optimizer.followers.rebuilt = lambda engine: _with(runner, UnitRunner._take_over, engine)
        optimizer.followers.renewed = lambda: _with(runner, UnitRunner.put_all_away)
        self.handles = [
            handle
            for number, unit in enumerate(units)
            for handle in (
                unit.module.register_forward_pre_hook(self._before(number), prepend=True, with_kwargs=True),
                unit.module.register_forward_hook(self._after(number), always_call=True),
            )
        ]

    def _take_over(self, engine: BucketEngine) -> None:
        self.params = [
            UnitParams(
                unit.name,
                [one for one in engine.buffers_of(set(unit.params)) if not one.residence.params],
                engine.gathers_with,
                self._may_read,
                self._nearby,
            )
            for unit in self._units
        ]
        self.put_all_away()
        if self.shown is not None:
            self.shown.follow(engine)

    def keep_after_forward(self, module: torch.nn.Module, keeps: bool) -> None:
        """Whether a unit stays between its forward and its backward."""
        for number, unit in enumerate(self._units):
            if unit.module is module:
                (self._keeping.add if keeps else self._keeping.discard)(number)

    def stay_after_backward(self, module: torch.nn.Module, stays: bool) -> None:
        """Whether a unit stays after its backward, for the next forward, unless a step comes first."""
        for number, unit in enumerate(self._units):
            if unit.module is module:
                (self._staying.add if stays else self._staying.discard)(number)

    def fetch_ahead(self, direction: Direction, module: torch.nn.Module, others: Sequence[torch.nn.Module]) -> None:
        """Say which units are asked for when this one computes, in place of those that came next last time."""
        numbers = {unit.module: number for number, unit in enumerate(self._units)}
        if module in numbers:
            self._told_ahead[direction, numbers[module]] = [numbers[other] for other in others if other in numbers]

    def start_over(self) -> None:
        """An exception has ended a forward or backward: as if it had never begun."""
        self._depth, self._task = 0, None
        self.put_all_away()
        if self.shown is not None:
            self.shown.show_shards()

    def params_of(self, module: torch.nn.Module) -> list[UnitParams]:
        """Of the unit that a module is, or of all for the root."""
        found = zip(self._units, self.params, strict=True)
        return [params for unit, params in found if unit.module is module or self._units[0].module is module]

    def names_of(self, module: torch.nn.Module) -> set[str]:
        """The parameters of the unit that a module is, without those of units inside it."""
        return {name for unit in self._units if unit.module is module for name in unit.params}

    def run_as_forward(
        self, module: torch.nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Another method of a unit's module, with its parameters here as in forward."""
        number = next(number for number, unit in enumerate(self._units) if unit.module is module)
        output = None
        self._before(number)(module, args, kwargs)
        try:
            output = method(*args, **kwargs)
        finally:
            self._after(number)(module, args, output)
        return output

    def put_all_away(self) -> None:
        """Only shards are left."""
        for params in self.params:
            params.put_away(lent_too=True)

    def _may_read(self) -> bool:
        return self._depth > 0 or torch._C._current_graph_task_id() != -1

    def _before(self, number: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            del module
            self._refuse_summoned()
            recomputing = torch._C._current_graph_task_id() != -1
            if not recomputing:
                if self._depth == 0:
                    self._begin_forward()
                self._order.ran(number)
            self._depth += 1
            mine = self.params[number]
            mine.start()
            if not recomputing:
                for ahead in self._next_forward(number):
                    self.params[ahead].start()
            mine.bring()
            if number and torch.is_grad_enabled() and not recomputing:
                inputs = _tensors((args, kwargs))
                if inputs:
                    register_multi_grad_hook(inputs, lambda _: self._backward_done(number), mode="all")

        return hook

    def _after(self, number: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            del module, args
            self._depth = max(self._depth - 1, 0)  # a hook before ours may have failed
            if torch._C._current_graph_task_id() != -1:
                return
            outputs = _tensors(output) if torch.is_grad_enabled() else []
            if outputs:
                register_multi_grad_hook(outputs, lambda _: self._backward_begins(number), mode="any")
            if not outputs or number not in self._keeping:
                self.params[number].put_away(for_backward=bool(outputs))
            if self._depth == 0:
                if not outputs:
                    self.put_all_away()
                if self.shown is not None:
                    self.shown.show_shards()

        return hook

    def _begin_forward(self) -> None:
        self._order.begin()
        if self.shown is not None:
            if self.shown.changed():  # whole parameters that are still here are of before the step
                self.put_all_away()
            self.shown.show_whole()

    def _refuse_summoned(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.followers.summoned:
            raise StateError(
                "a forward inside rt.summon_full_params: units would be put away under whoever looks at them; leave "
                "the block first"
            )

    def _next_forward(self, number: int) -> Sequence[int]:
        told = self._told_ahead.get(("forward", number))
        if told is not None:
            return told
        return self._order.next_forward(self._prefetch.limit) if self._prefetch.forward else ()

    def _backward_begins(self, number: int) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            call_after_backward(self._backward_ended)
            if self.shown is not None:
                self.shown.show_whole()
        mine = self.params[number]
        mine.start()
        told = self._told_ahead.get(("backward", number))
        if told is not None:
            for ahead in told:
                self.params[ahead].start()
        elif self._prefetch.backward == "pre":
            self._start_ahead(number)
        mine.bring()

    def _backward_done(self, number: int) -> None:
        if number not in self._staying:
            self.params[number].put_away()
        if self._prefetch.backward == "post" and ("backward", number) not in self._told_ahead:
            self._start_ahead(number)

    def _start_ahead(self, number: int) -> None:
        for ahead in self._order.next_backward(number, self._prefetch.limit):
            self.params[ahead].start()

    def _backward_ended(self) -> None:
        self._task = None
        for number, params in enumerate(self.params):
            if number not in self._staying:
                params.put_away(lent_too=True)
        if self.shown is not None:
            self.shown.show_shards()


def _with(reference: weakref.ref[Any], method: Callable[..., None], *args: Any) -> None:
    alive = reference()
    if alive is not None:
        method(alive, *args)


def _tensors(values: Any) -> list[torch.Tensor]:
    """The tensors in whatever a module takes or returns that gradients go through."""
    found: list[torch.Tensor] = []

    def look(value: Any) -> None:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                if leaf.requires_grad and not any(leaf is one for one in found):
                    found.append(leaf)
            elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
                look([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
            elif isinstance(leaf, Mapping):
                look(list(leaf.values()))

    look(values)
    return found

"""Brings parameters before a unit computes and puts them away afterwards, forward and backward.

Note [When units come and go]: before a unit's forward its parameters are brought, after it they are put away. Its
outputs carry a hook that brings them again before its backward begins, its inputs one that puts them away when their
gradients are there, which is when nothing in the unit is left to compute. Inputs without gradients (the first layer's)
leave that to the end of backward. The root's parameters stay from the beginning of forward to the end of backward,
unless they are told to go between the two.

Note [Needed again at once]: the unit whose forward ends last is the one that backward begins with, and would be
gathered again right after it has gone. So it stays, unless somebody wants all of them to go. Which one it is follows
from the forward before.

Note [Recomputation]: inside backward a forward is a recomputation (activation checkpointing). What it brings stays for
the gradients that are computed next. With ``use_reentrant=False`` these belong to the graph of the first forward, and
its hooks put units away. With ``use_reentrant=True`` they belong to a graph of their own, which a backward inside
backward runs through: so what is recomputed gets hooks too, which nobody calls in the other case. A unit that a
backward has begun with is not put away by another that is inside it.

Note [After an exception]: a forward that raised has its units put away by hooks that are called all the same. Those are
not called for what is no ``Exception``, and an exception ends backward without any call: what such have left is noticed
when the next forward begins, and put away then.

Note [Out before in]: what one unit returns the next one takes, so the gradient of that tensor ends one backward and
begins another. Hooks on a tensor run in the order in which they came; so that the one unit goes before the parameters
of yet another are asked for, hooks on outputs are added only after those on the next unit's inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from shardrt.errors import StateError, UnsupportedError
from shardrt.optim.backward import BackwardToken
from shardrt.optim.engine import BucketEngine
from shardrt.optim.followers import call_if_alive
from shardrt.optim.sharded import ShardedOptimizer
from shardrt.protocols import Communicator
from shardrt.sharding.dividing import Parts, called_by_compiled
from shardrt.sharding.first_error import quiet_after_failure
from shardrt.sharding.outstanding import Outstanding, UnitBackward
from shardrt.sharding.prefetching import Ahead, Direction, Prefetch, RunningOrder
from shardrt.sharding.shown import ShownShards
from shardrt.sharding.tensors import differentiable, when_gradients_come
from shardrt.sharding.uncompiled import uncompiled
from shardrt.sharding.unit_params import Reader, UnitParams
from shardrt.sharding.units import Unit
from shardrt.sharding.viewing import meet_before_update, show_where_they_are


class UnitRunner:
    """The hooks of one sharded module. See Note [When units come and go]."""

    def __init__(
        self,
        units: Sequence[Unit],
        optimizer: ShardedOptimizer,
        prefetch: Prefetch,
        *,
        keeps_after_forward: bool = False,
        keeps_last: bool = False,
        nearby: Communicator | None = None,
        shown: ShownShards | None = None,
    ) -> None:
        """``keeps_after_forward``: units stay until their backward. ``keeps_last``: see Note [Needed again at once].
        ``nearby``: see Note [Kept nearby]. ``shown``: what the module's attributes are outside forward and backward, if
        not the whole parameters."""
        self._units = units
        self._keeping = set(range(len(units) if keeps_after_forward else 1))
        self._keeps_last = keeps_last
        self._staying: set[int] = set()
        self._nearby = nearby
        self.shown = shown
        self._parts = Parts(units)
        self._order = RunningOrder()
        self._ahead = Ahead(prefetch, self._order, self._parts)
        self._depth = 0
        self._running: list[int] = []
        """Units and parts whose forward goes on, the innermost last."""
        self._backwards: weakref.WeakValueDictionary[int, UnitBackward] = weakref.WeakValueDictionary()
        """Those that go on, by their number."""
        self._in_backward = False
        """Whether one has begun; it may have raised."""
        self._recomputed: set[int] = set()
        """Units that a recomputation has brought, and nothing has put away since."""
        self._unhooked: list[tuple[list[torch.Tensor], Callable[[torch.Tensor], None]]] = []
        """Outputs of units that have run, and what to call before their backward."""
        self.params: list[UnitParams] = []
        self._buckets: list[list[int]] = []
        """Of the gradients of each unit."""
        self._calls = Outstanding(len(units))
        self._optimizer = weakref.ref(optimizer)
        self._take_over(optimizer.engine)
        # Weak: the optimizer's hooks on parameters live as long as these.
        optimizer.followers.rebuilding = partial(call_if_alive, weakref.WeakMethod(self.put_all_away))
        optimizer.followers.rebuilt = partial(call_if_alive, weakref.WeakMethod(self._take_over))
        optimizer.followers.updating = partial(call_if_alive, weakref.WeakMethod(self._before_update))
        optimizer.followers.renewed = partial(call_if_alive, weakref.WeakMethod(self._renewed))
        optimizer.followers.gather = partial(call_if_alive, weakref.WeakMethod(self._take_part))
        self._handles = [
            (
                unit.module.register_forward_pre_hook(self._before(number), prepend=True, with_kwargs=True),
                unit.module.register_forward_hook(self._after(number), always_call=True),
            )
            for number, unit in enumerate(units)
        ]

    def _take_over(self, engine: BucketEngine) -> None:
        names = [unit.name for unit in self._units]
        self.params = [
            UnitParams(
                names,
                number,
                [one for one in engine.buffers_of(set(unit.params)) if not one.residence.params],
                engine.gathers_with,
                on_read=self._may_read,
                on_gather=self._announce,
                copies=self._is_joined,
                nearby=self._nearby,
            )
            for number, unit in enumerate(self._units)
        ]
        self._buckets = [
            [index for index, one in enumerate(engine.at_work) if one.buffers.bucket.params[0] in unit.params]
            for unit in self._units
        ]
        self.put_all_away()
        optimizer = self._optimizer()
        if optimizer is not None and self._may_view(optimizer):
            show_where_they_are(engine.every_buffers(), engine.gathers_with)
        if self.shown is not None:
            self.shown.follow(engine)

    def keep_after_forward(self, module: torch.nn.Module, keeps: bool) -> None:
        """Whether a unit stays between its forward and its backward."""
        self._in_set(self._keeping, module, keeps)

    def stay_after_backward(self, module: torch.nn.Module, stays: bool) -> None:
        """Whether a unit stays after its backward, for the next forward, unless a step comes first."""
        self._in_set(self._staying, module, stays)

    def _in_set(self, numbers: set[int], module: torch.nn.Module, is_in: bool) -> None:
        number = self._number_of(module)
        if number is None:
            return
        if is_in:
            self._parts.follow_all(number)
        for one in (number, *self._parts.of(number)):
            (numbers.add if is_in else numbers.discard)(one)

    def _number_of(self, module: torch.nn.Module) -> int | None:
        """Of the unit that a module is; parts are not units."""
        found = (n for n, unit in enumerate(self._units) if unit.module is module and unit.within is None)
        return next(found, None)

    def fetch_ahead(self, direction: Direction, module: torch.nn.Module, others: Sequence[torch.nn.Module]) -> None:
        """Say which units are asked for when this one computes, in place of those that came next last time."""
        number = self._number_of(module)
        if number is not None:
            found = [self._number_of(other) for other in others]
            self._ahead.tell(direction, number, [one for one in found if one is not None])

    def names_of(self, module: torch.nn.Module) -> set[str]:
        """The parameters of the unit that a module is, without those of units inside it."""
        number = self._number_of(module)
        numbers = () if number is None else (number, *self._parts.of(number))
        return {name for one in numbers for name in self._units[one].params}

    def start_over(self) -> None:
        """As if a forward or backward that an exception has ended had never begun."""
        self._depth = 0
        self._running.clear()
        self._unhooked.clear()
        self._in_backward = False
        self.put_all_away()
        if self.shown is not None:
            self.shown.show_shards()

    def params_of(self, module: torch.nn.Module) -> list[UnitParams]:
        """Of the unit that a module is, with its parts, or of all for the root."""
        number = self._number_of(module)
        if number is None:
            return []
        return self.params if number == 0 else [self.params[one] for one in (number, *self._parts.of(number))]

    def bring_together(self, module: torch.nn.Module) -> list[UnitParams]:
        """The same, for whoever brings them without a forward: their parts follow from then on."""
        number = self._number_of(module)
        for one in range(len(self._units)) if number == 0 else [] if number is None else [number]:
            self._parts.follow_all(one)
        return self.params_of(module)

    def run_as_forward(
        self, module: torch.nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Another method of a unit's module, with its parameters here as in forward."""
        number = self._number_of(module)
        assert number is not None
        output = None
        self._before(number)(module, args, kwargs)
        try:
            output = method(*args, **kwargs)
        finally:
            self._after(number)(module, args, output)
        return output

    def put_all_away(self) -> None:
        """Only shards are left."""
        self._recomputed.clear()
        for params in self.params:
            params.put_away(lent_too=True)

    def _renewed(self) -> None:
        self._calls.forget()
        self.put_all_away()

    def whole(self) -> list[str]:
        """The units whose parameters are here, or on their way."""
        here = [number for number, params in enumerate(self.params) if params.is_here or params.is_coming]
        return list(dict.fromkeys(self.params[self._parts.unit_of(number)].name for number in here))

    def _may_view(self, optimizer: ShardedOptimizer) -> bool:
        """Whether whoever updates the shards waits for all that read them. See Note [Read and write]."""
        return not optimizer.updates_early and self.shown is None and self._nearby is None

    def _before_update(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None and not self._is_joined():
            meet_before_update(optimizer.engine)

    def _announce(self, number: int) -> None:
        """Where ranks have uneven inputs, those without are told of each gather. See :mod:`shardrt.joining`."""
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.announcer is not None:
            optimizer.announcer.announce("gather", optimizer, unit=number)

    def _is_joined(self) -> bool:
        optimizer = self._optimizer()
        return optimizer is not None and optimizer.announcer is not None

    def _take_part(self, number: int) -> None:
        """Other ranks gather a unit, of which this rank has a part and no use for the whole."""
        self._bring(number)
        self.params[number].put_away(lent_too=True)

    def _may_read(self, number: int) -> Reader:
        if self._parts.follow(number, self._running):
            return "around"
        return "elsewhere" if self._depth > 0 or torch._C._current_graph_task_id() != -1 else "outside"

    def _before(self, number: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            recomputing = torch._C._current_graph_task_id() != -1
            if recomputing and self.shown is not None:
                self.shown.show_whole()
            if not recomputing:
                self._refuse_summoned()
                self._clear_up(number)
                if self._depth == 0:
                    self._begin_forward()
                self._order.ran(number)
            self._depth += 1
            self._running.append(number)
            parts = self._parts.of(number)
            if parts and not self._parts.all_follow(number) and called_by_compiled():
                self._give_up(number)
            with_parts = () if module.training or torch.is_grad_enabled() else parts
            ahead = () if recomputing else self._ahead.in_forward(number, beyond=bool(with_parts))
            self._bring(number, ahead, with_parts)
            if torch.is_grad_enabled():
                if recomputing:
                    self._recomputed.add(number)
                inputs = differentiable((args, kwargs)) if number else []
                if inputs:
                    when_gradients_come(inputs, done, mode="all")
                    if not recomputing:
                        self._calls.begin(number, inputs)
                self._hook_outputs()

        done = uncompiled(lambda _: self._backward_done(number))
        return uncompiled(hook)

    def _after(self, number: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            del args
            self._depth = max(self._depth - 1, 0)  # a hook before ours may have failed
            if number in self._running:
                del self._running[self._running.index(number) :]
            outputs = differentiable(output) if torch.is_grad_enabled() else []
            if outputs:
                self._unhooked.append((outputs, begins))
            recomputing = torch._C._current_graph_task_id() != -1
            if recomputing or number == 0 or self._depth == 0:
                self._hook_outputs()
            if recomputing:
                if not torch.is_grad_enabled():
                    self._put_away(number)
                return
            if not outputs or not self._stays(number):
                self._put_away(number, for_backward=bool(outputs))
            if not outputs and not module.training:
                for part in self._parts.of(number):
                    self._put_away(part)
            self._order.ended(number)
            if self._depth == 0:
                if not self._is_joined():
                    self._order.completed()
                if not outputs:
                    self.put_all_away()
                if self.shown is not None:
                    self.shown.show_shards()

        begins = uncompiled(lambda _: self._backward_begins(number))
        return uncompiled(quiet_after_failure(hook))

    def _stays(self, number: int) -> bool:
        """Between forward and backward."""
        if number in self._keeping:
            return True
        if not self._keeps_last or self._is_joined():  # ranks without inputs know nothing of the order
            return False
        return self._order.ends_last(number) and not self._parts.of(number)

    def _hook_outputs(self) -> None:
        """See Note [Out before in]."""
        for outputs, begins in self._unhooked:
            when_gradients_come(outputs, begins, mode="any")
        self._unhooked.clear()

    def _clear_up(self, number: int) -> None:
        """See Note [After an exception]."""
        if (number == 0 and self._depth) or (self._in_backward and not self._backwards):
            self.start_over()

    def _give_up(self, number: int) -> None:
        """See Note [Parts and compilers]."""
        self._parts.follow_all(number)
        for part in self._parts.of(number):
            for handle in self._handles[part]:
                handle.remove()

    def _begin_forward(self) -> None:
        self._running.clear()
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

    def _bring(self, number: int, ahead: Sequence[int] = (), parts: Sequence[int] = ()) -> None:
        optimizer = self._optimizer()
        wanted = list(dict.fromkeys((*self._parts.followed_by(number), *parts)))
        with nullcontext() if optimizer is None else optimizer.telling_peers():
            for one in wanted:
                self.params[one].start()
            for later in ahead:
                for one in self._parts.followed_by(later):
                    self.params[one].start()
            for one in wanted:
                self.params[one].bring()

    def _put_away(self, number: int, *, for_backward: bool = False) -> None:
        """Unless a backward that goes on has begun with it, or it goes with another."""
        if self._parts.follows(number) or any(number in backward.units for backward in list(self._backwards.values())):
            return
        for one in self._parts.followed_by(number):
            self._recomputed.discard(one)
            # Ranks that follow others' gathers have kept nothing nearby.
            self.params[one].put_away(for_backward=for_backward and not self._is_joined())

    def _backward_begins(self, number: int) -> None:
        self._running_backward().units.add(number)
        self._bring(number, self._ahead.in_backward(number))

    def _running_backward(self) -> UnitBackward:
        found = self._backwards.get(torch._C._current_graph_task_id())
        if found is None:
            if torch.is_grad_enabled():
                raise UnsupportedError(
                    "a backward with create_graph=True: a backward through it would need parameters that are put away "
                    "when this one is done with them; use strategy='shard_grad_op', which keeps them whole"
                )
            optimizer = self._optimizer()
            if optimizer is not None and optimizer.watch is not None:
                optimizer.watch.notice()
            found = UnitBackward(self._backward_ended)
            self._backwards[found.task] = found
            self._in_backward = True
            if self.shown is not None:
                self.shown.show_whole()
        return found

    def _backward_done(self, number: int) -> None:
        self._running_backward().units.discard(number)
        self._hand_on_what_is_left(number)
        if number not in self._staying:
            self._put_away(number)
        for later in self._ahead.after_backward(number):
            for one in self._parts.followed_by(later):
                self.params[one].start()

    def _hand_on_what_is_left(self, number: int) -> None:
        """See Note [Missing on some ranks]. What was recomputed, or lent, may get more gradients later."""
        over = self._calls.end(number) and number not in self._recomputed and len(self._backwards) == 1
        optimizer = self._optimizer()
        if over and not self.params[number].is_lent and optimizer is not None and optimizer.watch is not None:
            optimizer.watch.nothing_more(self._buckets[number])

    def _backward_ended(self, backward: BackwardToken) -> None:
        assert isinstance(backward, UnitBackward)
        del self._backwards[backward.task]
        if not self._backwards:
            self._in_backward = False
            self._recomputed.clear()
            for number, params in enumerate(self.params):
                if number not in self._staying:
                    params.put_away(lent_too=True)
            if self.shown is not None:
                self.shown.show_shards()
            return
        for number in backward.units | self._recomputed:
            self._put_away(number)

"""What a trainer calls on a runtime for state dicts of its modules and optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from shardrt.errors import ConfigError, StateError
from shardrt.handshake import Field
from shardrt.optim.agreement import comparable
from shardrt.optim.lone import LoneOptimizer
from shardrt.optim.managed import ManagedOptimizer
from shardrt.plan import Shard
from shardrt.protocols import Communicator, ControlChannel
from shardrt.state.full import check_torch_state, full_optimizer_state, slice_torch_state, steps_in, torch_groups
from shardrt.state.gathering import hand_out_apart, whole_model, write_whole
from shardrt.state.handing_out import hand_out_model, hand_out_optimizer
from shardrt.state.kinds import StateKind
from shardrt.state.models import ModelState, OwnParts, copies, matched, model_state, unwrapped
from shardrt.state.optimizers import put_options, stored_names
from shardrt.state.parts import (
    MARK,
    Wanted,
    collect_parts,
    local_optimizer_state,
    read_parts,
    sharded_model_state,
    sharded_optimizer_state,
)

Target = torch.nn.Module | torch.optim.Optimizer


class StateCalls:
    """The part of :class:`shardrt.Runtime` that makes and loads state dicts."""

    rank: int
    world_size: int
    device_type: str
    _control: ControlChannel
    _kinds: weakref.WeakKeyDictionary[Any, StateKind]
    _answering: weakref.WeakKeyDictionary[torch.nn.Module, Any]
    """Modules whose own ``state_dict`` follows the form that was set for them."""
    _reading_modules = False

    def negotiate(self, dtypes: Iterable[str]) -> Communicator:
        """See :meth:`shardrt.Runtime.negotiate`."""
        raise NotImplementedError

    def agreeing(self, topic: str) -> AbstractContextManager[dict[str, Field]]:
        """See :meth:`shardrt.Runtime.agreeing`."""
        raise NotImplementedError

    def living_optimizers(self) -> list[ManagedOptimizer]:
        """See :meth:`shardrt.loop.LoopCalls.living_optimizers`."""
        raise NotImplementedError

    def full_state_dict(
        self, target: Target, *, rank0_only: bool = False, offload_to_cpu: bool = False
    ) -> dict[str, Any]:
        """The whole state, in the format of torch's own ``state_dict``, in memory of its own. Every rank calls it.

        ``target`` is a module or an optimizer of this runtime. With ``rank0_only`` the first rank gets it and the
        others an empty mapping; no other rank then holds more than its share and a window of some megabytes.

        Example:
            >>> import shardrt, torch
            >>> model = torch.nn.Linear(2, 1)
            >>> rt = shardrt.Runtime()
            >>> opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
            >>> model(torch.ones(1, 2)).sum().backward()
            >>> opt.step()
            >>> plain = torch.optim.SGD(model.named_parameters(), lr=0.5)
            >>> plain.load_state_dict(rt.full_state_dict(opt))
            >>> plain.param_groups[0]["lr"], plain.state[model.bias]["momentum_buffer"]
            (0.1, tensor([1.]))
        """
        return self._made(target, StateKind.read("full", rank0_only=rank0_only, offload_to_cpu=offload_to_cpu))

    def sharded_state_dict(self, target: Target, *, offload_to_cpu: bool = False) -> dict[str, Any]:
        """This rank's part of the state, which says what it is a part of. Nothing is communicated: one rank may ask.

        Its tensors are the live ones, as in torch's own state dicts of optimizers: copy what is to be kept.

        Example:
            >>> import shardrt, torch
            >>> model = torch.nn.Linear(2, 1)
            >>> rt = shardrt.Runtime()
            >>> opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
            >>> rt.sharded_state_dict(opt)["param_groups"][0]["params"]
            ['weight', 'bias']
        """
        return self._made(target, StateKind.read("sharded", offload_to_cpu=offload_to_cpu))

    def local_state_dict(self, target: Target, *, offload_to_cpu: bool = False) -> dict[str, Any]:
        """What this rank keeps, as it keeps it: only the very same plan can load it. Nothing is communicated.

        Example:
            >>> import shardrt, torch
            >>> model = torch.nn.Linear(2, 1)
            >>> rt = shardrt.Runtime()
            >>> opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
            >>> rt.local_state_dict(opt)["shardrt"]["kind"]
            'local'
        """
        return self._made(target, StateKind.read("local", offload_to_cpu=offload_to_cpu))

    def state_dict(self, target: Target) -> dict[str, Any]:
        """The state in the form that :meth:`state_dict_type` has set for this target; by default the whole.

        Example:
            >>> import shardrt, torch
            >>> rt = shardrt.Runtime()
            >>> sorted(rt.state_dict(torch.nn.Linear(2, 1)))
            ['bias', 'weight']
        """
        return self._made(target, self._kinds.get(target, StateKind()))

    def set_state_dict_type(
        self,
        target: Target,
        kind: Any,
        config: Any = None,
        *,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
    ) -> StateKind:
        """From now on ``target.state_dict()`` and ``rt.state_dict(target)`` have this form.

        ``kind`` is ``"full"``, ``"sharded"``, ``"local"`` or a member of torch's ``StateDictType``; ``config`` one of
        torch's configs for it. Returns the form that was set before.

        Example:
            >>> import shardrt, torch
            >>> rt = shardrt.Runtime()
            >>> rt.set_state_dict_type(torch.nn.Linear(2, 1), "sharded", offload_to_cpu=True).kind
            'full'
        """
        self._checked(target)
        before = self._kinds.get(target, StateKind())
        self._kinds[target] = StateKind.read(kind, config, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu)
        if isinstance(target, torch.nn.Module) and target not in self._answering:
            hook = _in_its_form(weakref.ref(self))
            self._answering[target] = target.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
        return before

    @contextmanager
    def state_dict_type(
        self,
        target: Target,
        kind: Any,
        config: Any = None,
        *,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
    ) -> Iterator[None]:
        """Inside this block, state dicts of the target have this form; see :meth:`set_state_dict_type`.

        Example:
            >>> import shardrt, torch
            >>> from torch.distributed.fsdp import StateDictType
            >>> model = torch.nn.Linear(2, 1)
            >>> rt = shardrt.Runtime()
            >>> opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
            >>> with rt.state_dict_type(opt, StateDictType.SHARDED_STATE_DICT):
            ...     print(opt.state_dict()["shardrt"]["kind"])
            sharded
        """
        before = self.set_state_dict_type(target, kind, config, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu)
        try:
            yield
        finally:
            self._kinds[target] = before

    def load_state_dict(self, target: Target, state: Any, *, strict: bool = True, rank0_only: bool = False) -> None:
        """Take over a state of any form: torch's own format, ours of one rank, or a list of those of several ranks.

        Every rank calls it. What is handed over is left as it is, and nothing is changed on any rank unless it fits on
        all of them. With ``rank0_only`` a full state that the first rank alone has is handed out from there; the others
        pass None. ``strict=False`` lets a module take what fits.

        Example:
            >>> import shardrt, torch
            >>> model = torch.nn.Linear(2, 1)
            >>> plain = torch.optim.AdamW(model.parameters(), lr=0.5)
            >>> rt = shardrt.Runtime()
            >>> opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1)
            >>> rt.load_state_dict(opt, plain.state_dict())
            >>> opt.param_groups[0]["lr"]
            0.5
        """
        found = self._checked(target)
        if isinstance(found, ManagedOptimizer):
            self._load_optimizer(found, state, rank0_only=rank0_only)
        else:
            self._load_module(found, state, strict=strict, rank0_only=rank0_only)

    def _checked(self, target: Any) -> Any:
        if isinstance(target, torch.nn.Module):
            return target
        managed = target if isinstance(target, ManagedOptimizer) else getattr(target, "sharded", None)
        if not isinstance(managed, ManagedOptimizer):
            raise ConfigError(
                f"expected a module or an optimizer of this runtime, got a {type(target).__name__}; pass what "
                "rt.optimizer returned"
            )
        return managed

    def _made(self, target: Target, kind: StateKind) -> dict[str, Any]:
        found = self._checked(target)
        if isinstance(found, ManagedOptimizer):
            found.check_between_steps("a state dict")
            return self._made_of_optimizer(found, kind)
        for optimizer in self.living_optimizers():
            optimizer.finish()
        self._reading_modules = True
        try:
            state = model_state(found)
        finally:
            self._reading_modules = False
        if kind.kind == "full":
            if state.apart:
                return self._gathered(found, state, kind)
            wanted = self.rank == 0 or not kind.rank0_only
            return copies(state, on_cpu=kind.offload_to_cpu) if wanted else {}
        return sharded_model_state(
            state, self._optimizers_for(found), self.rank, self.world_size, on_cpu=kind.offload_to_cpu
        )

    def _gathered(self, module: torch.nn.Module, state: ModelState, kind: StateKind) -> dict[str, Any]:
        with self.agreeing("full state dict of a module") as fields:
            fields["rank0_only"] = Field(value=kind.rank0_only, fix="ask alike on every rank")
        return whole_model(
            state,
            self._optimizers_for(module),
            self.negotiate(()),
            to=0 if kind.rank0_only else None,
            device=torch.device(self.device_type),
            on_cpu=kind.offload_to_cpu,
        )

    def _made_of_optimizer(self, optimizer: ManagedOptimizer, kind: StateKind) -> dict[str, Any]:
        if kind.kind != "full":
            make = sharded_optimizer_state if kind.kind == "sharded" else local_optimizer_state
            return make(optimizer, self.rank, self.world_size, on_cpu=kind.offload_to_cpu)
        if isinstance(optimizer, LoneOptimizer) and not kind.offload_to_cpu:
            own = torch.optim.Optimizer.state_dict(optimizer._local_optimizer())
            return {**own, "param_groups": torch_groups(optimizer)}
        return self.gather_state(optimizer, to=0 if kind.rank0_only else None, offload_to_cpu=kind.offload_to_cpu)

    def gather_state(self, optimizer: ManagedOptimizer, *, to: int | None, offload_to_cpu: bool) -> dict[str, Any]:
        """The whole state of an optimizer on one rank, or on all; every rank calls it."""
        optimizer.check_between_steps("a state dict")
        with self.agreeing("full state dict") as fields:
            if to is not None and not 0 <= to < self.world_size:
                raise ConfigError(f"there is no rank {to} to bring the state to; ranks are 0 to {self.world_size - 1}")
            fields["receiving rank"] = Field(value=to, fix="ask alike on every rank")
        return full_optimizer_state(
            optimizer,
            self.negotiate(()),
            self._control,
            to=to,
            device=torch.device(self.device_type),
            on_cpu=offload_to_cpu,
        )

    def _optimizers_for(self, module: torch.nn.Module) -> list[ManagedOptimizer]:
        params = set(unwrapped(module).parameters())
        return [optimizer for optimizer in self.living_optimizers() if optimizer.trained() & params]

    def _load_optimizer(self, optimizer: ManagedOptimizer, state: Any, *, rank0_only: bool) -> None:
        optimizer.check_between_steps("loading")
        mark = state.get(MARK) if isinstance(state, Mapping) else None
        if isinstance(state, (list, tuple)) or (mark and mark.get("kind") == "sharded"):
            self._load_parts(optimizer, state)
            return
        with self.agreeing("load_state_dict") as fields:
            steps = None
            if mark:
                taken, options, steps = self._local(optimizer, state, mark)
            elif rank0_only and self.rank != 0:
                taken, options = {}, None
            else:
                _check_mapping(state)
                by_param = check_torch_state(optimizer, state)
                options = [_options_of(group) for group in state["param_groups"]]
                taken = slice_torch_state(optimizer, by_param) if not rank0_only else {}
                steps = steps_in(by_param)
            if not rank0_only:
                fields["group options"] = Field(
                    value=comparable([dict(group) for group in options or ()]),
                    fix="load the same state dict on every rank",
                )
        if rank0_only:
            full = by_param if self.rank == 0 else None
            device = torch.device(self.device_type)
            taken, options, steps = hand_out_optimizer(
                optimizer, full, options, steps, self.negotiate(()), self._control, device
            )
        put_options(optimizer, options or [])
        optimizer.replace_state(taken)
        if steps is not None:
            optimizer.steps_taken = steps

    def _local(
        self, optimizer: ManagedOptimizer, state: Mapping[str, Any], mark: Mapping[str, Any]
    ) -> tuple[dict[torch.Tensor, Any], list[dict[str, Any]], int]:
        here = (optimizer.plan.fingerprint, self.rank, self.world_size)
        there = (mark.get("plan"), mark.get("rank"), mark.get("world_size"))
        if mark.get("kind") != "local" or mark.get("of") != "optimizer" or here != there:
            raise StateError(
                f"a local state dict fits only where it was made: it is of plan {there[0]}, rank {there[1]} of "
                f"{there[2]}, and this is plan {here[0]}, rank {here[1]} of {here[2]}; use a sharded or a full one"
            )
        stepped = [tensor for _, tensor in optimizer.owned()]
        taken = {
            stepped[number]: {
                key: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for key, value in values.items()
            }
            for number, values in state["state"].items()
        }
        return taken, [dict(group) for group in state["param_groups"]], int(mark["steps"])

    def _load_parts(self, optimizer: ManagedOptimizer, state: Any) -> None:
        names = stored_names(optimizer)
        with self.agreeing("load_state_dict") as fields:
            parts = read_parts(state, "optimizer")
            groups = parts[0]["param_groups"]
            if len(groups) != len(optimizer.param_groups):
                raise StateError(
                    f"the state dict has {len(groups)} parameter groups, this optimizer {len(optimizer.param_groups)}"
                )
            options = [_options_of(group) for group in groups]
            fields["group options"] = Field(value=comparable(options), fix="load parts of one state on every rank")
        owned = optimizer.owned()
        shapes = {names[name]: tuple(tensor.shape) for name, tensor in optimizer.named().items()}
        wanted = [Wanted(param=names[shard.param], start=shard.start, stop=shard.stop) for shard, _ in owned]
        device = torch.device(self.device_type)
        found = collect_parts(parts, wanted, shapes, self.negotiate(()), self._control, device)
        taken: dict[torch.Tensor, Any] = {}
        for (_, stepped), (sliced, whole) in zip(owned, found, strict=True):
            values = {**whole, **{key: flat.view(stepped.shape) for key, flat in sliced.items()}}
            if values:
                taken[stepped] = values
        put_options(optimizer, options)
        optimizer.replace_state(taken)
        optimizer.steps_taken = int(parts[0][MARK].get("steps", 0))

    def _load_module(self, module: torch.nn.Module, state: Any, *, strict: bool, rank0_only: bool) -> None:
        for optimizer in self.living_optimizers():
            optimizer.check_between_steps("loading")
            optimizer.finish()
        mark = state.get(MARK) if isinstance(state, Mapping) else None
        if isinstance(state, (list, tuple)) or mark:
            self._load_model_parts(module, state)
            return
        with self.agreeing("load_state_dict"):
            tensors: dict[str, torch.Tensor] = {}
            values: dict[str, Any] = {}
            if self.rank == 0 or not rank0_only:
                _check_mapping(state)
                tensors, values = matched(module, state, strict=strict)
        found = model_state(module)
        live = {name: tensor for name, tensor in found.tensors.items() if name not in found.apart}
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name in live:
                    live[name].detach().copy_(tensor)
            if found.apart and not rank0_only:
                write_whole(found, self._optimizers_for(module), tensors)
        if rank0_only:
            device = torch.device(self.device_type)
            hand_out_model(live, self.negotiate(()), self._control, device)
            if found.apart:
                names = self._control.exchange("sharded parameters", [n for n in found.tensors if n in tensors])[0]
                named = [name for name in names if name in found.apart]
                hand_out_apart(found, self._optimizers_for(module), tensors, named, self.negotiate(()), device)
        self._spread(module)
        torch.autograd.graph.increment_version(list(live.values()))
        if values:
            unwrapped(module).load_state_dict(values, strict=False)

    def _spread(self, module: torch.nn.Module) -> None:
        for optimizer in self._optimizers_for(module):
            optimizer.spread_parameters()

    def _load_model_parts(self, module: torch.nn.Module, state: Any) -> None:
        with self.agreeing("load_state_dict"):
            parts = read_parts(state, "model")
            live = model_state(module)
        shapes = {name: tuple(tensor.shape) for name, tensor in live.tensors.items()}
        optimizers = self._optimizers_for(module)
        own = OwnParts(live, optimizers)
        mine = [
            shard
            for name, tensor in live.tensors.items()
            for shard in (own.of(name) if name in live.apart else [Shard(name, 0, tensor.numel(), self.rank)])
        ]
        wanted = [Wanted(param=shard.param, start=shard.start, stop=shard.stop) for shard in mine]
        device = torch.device(self.device_type)
        found = collect_parts(parts, wanted, shapes, self.negotiate(()), self._control, device)
        with torch.no_grad():
            for shard, (sliced, _) in zip(mine, found, strict=True):
                if shard.param in live.apart:
                    own.write(shard, sliced["value"])
                else:
                    live.tensors[shard.param].detach().copy_(sliced["value"].view(shapes[shard.param]))
        self._spread(module)
        torch.autograd.graph.increment_version(list(live.tensors.values()))
        extra = {key: value for part in parts for key, value in part.get("extra_state", {}).items()}
        if extra:
            unwrapped(module).load_state_dict(extra, strict=False)


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _check_mapping(state: object) -> None:
    if not isinstance(state, Mapping):
        raise StateError(
            f"a state dict is a mapping, got {type(state).__name__}; on ranks without one pass rank0_only=True"
        )


def _in_its_form(runtime: weakref.ref[StateCalls]) -> Callable[..., None]:
    """A module's own ``state_dict()``, turned into the form that was set for it."""

    def hook(module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        calls = runtime()
        if calls is None or prefix or calls._reading_modules:
            return
        kind = calls._kinds.get(module, StateKind())
        if kind != StateKind():
            made = calls._made(module, kind)
            state.clear()
            state.update(made)

    return hook

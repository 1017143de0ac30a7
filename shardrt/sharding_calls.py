"""What a trainer calls on a runtime to shard whole modules."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from shardrt.errors import ConfigError
from shardrt.optim.kept import kept_dtype
from shardrt.optim.managed import ManagedOptimizer
from shardrt.optim.sharded import ShardedOptimizer
from shardrt.sharding.building import shard_module
from shardrt.sharding.own_state import answer_by_runtime
from shardrt.sharding.running import UnitRunner
from shardrt.sharding.summoned_gradients import SummonedGradients
from shardrt.sharding.summoning import summoned


class ShardingCalls:
    """The part of :class:`shardrt.Runtime` that shards modules."""

    rank: int
    _optimizers: list[weakref.ref[ManagedOptimizer]]
    _runners: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[UnitRunner]]
    """By module; the module's hooks keep its runner alive."""

    def living_optimizers(self) -> list[ManagedOptimizer]:
        """See :meth:`shardrt.loop.LoopCalls.living_optimizers`."""
        raise NotImplementedError

    def _check_open(self) -> None:
        raise NotImplementedError

    def shard(
        self,
        module: torch.nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        strategy: Any = "full_shard",
        units: Any = None,
        partitioner: Any = None,
        prefetch: Any = "pre",
        mixed_precision: Any = None,
        param_init_fn: Any = None,
        offload: Any = False,
        shard_size: int | None = None,
        mesh: Any = None,
        reshard_after_forward: bool | int | None = None,
        divide_units: bool = False,
        sync_module_states: bool = True,
        ignored_modules: Iterable[torch.nn.Module] = (),
        ignored_parameters: Iterable[torch.nn.Parameter] = (),
        param_groups: Any = None,
        elementwise: bool | None = None,
        uses: Sequence[str] = (),
        **defaults: Any,
    ) -> tuple[torch.nn.Module, ManagedOptimizer]:
        """Shard a module and its optimizer; returns both. Every rank must call it alike.

        The module stays the object it is, and is called as ever. ``strategy`` is ``"no_shard"``, ``"shard_optim"``
        (ZeRO-1), ``"shard_grad_op"`` (ZeRO-2), ``"full_shard"`` (ZeRO-3), ``"hybrid_shard"`` or
        ``"hybrid_shard_zero2"`` (sharded among the ranks of a host, or ``shard_size`` neighbouring ones, and replicated
        across), or a member of torch's ``ShardingStrategy``.
        ``units`` says which parameters are gathered together: module classes, modules, a number of parameters, a
        function of a module, a policy of torch's, or None for the repeated blocks. ``prefetch`` is ``"pre"``,
        ``"post"``, None, or a :class:`shardrt.Prefetch`. ``mixed_precision`` is a :class:`shardrt.MixedPrecision`,
        torch's, or a dtype to compute with. ``partitioner`` divides each unit; by default into even ranges, or by whole
        parameters where the optimizer needs them. A module on the meta device is materialised unit by unit, by the
        ``reset_parameters`` of its modules or by ``param_init_fn``, a function of a module. With ``offload`` (or
        torch's ``CPUOffload``) shards, reduced gradients and optimizer state live in the CPU's memory and are stepped
        there. ``mesh`` says which ranks share under a hybrid strategy: groups of ranks, or a ``DeviceMesh`` of two axes
        (replicas, shards). Units go after forward, but for the one that backward begins with; with
        ``reshard_after_forward=True`` that one too, with False all stay until their backward, with a number of ranks so
        many neighbours keep a copy between them. With ``divide_units`` units larger than a bucket are divided at the
        layers inside them, which are then gathered one by one: less memory, more time. With ``sync_module_states`` all
        ranks start from the parameters and buffers of rank 0; without, parameters that differ are an error.
        ``param_groups`` are groups with options of their own, as optimizers of torch's take them, or a function of the
        module that makes them.

        Example:
            >>> import shardrt, torch
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            >>> rt = shardrt.Runtime()
            >>> model, opt = rt.shard(model, torch.optim.AdamW, lr=3e-4, strategy="full_shard")
            >>> model(torch.ones(1, 4)).sum().backward()
            >>> opt.step()
        """
        self._check_open()
        made = shard_module(
            self,  # type: ignore[arg-type]
            module,
            optimizer_class,
            strategy=strategy,
            units=units,
            partitioner=partitioner,
            prefetch=prefetch,
            mixed_precision=mixed_precision,
            param_init_fn=param_init_fn,
            offload=offload,
            shard_size=shard_size,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            divide_units=divide_units,
            sync_module_states=sync_module_states,
            ignored_modules=ignored_modules,
            ignored_parameters=ignored_parameters,
            param_groups=param_groups,
            runners=self._runners,
            elementwise=elementwise,
            uses=uses,
            defaults=defaults,
            arguments=set(inspect.signature(ShardingCalls.shard).parameters) - {"self", "defaults"},
        )
        self._optimizers.append(weakref.ref(made))
        if any(kept_dtype(param) is not None for param in module.parameters()):
            answer_by_runtime(module, self)  # type: ignore[arg-type]
        return module, made

    @contextmanager
    def summon_full_params(
        self,
        module: torch.nn.Module,
        *,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """A block in which a sharded module has its whole parameters, in full precision. Every rank must enter it.

        ``recurse=False`` is for the module's own, without those of modules inside it. What is written to them is kept
        if ``writeback``. With ``rank0_only`` the other ranks do not get them; nothing is written back then.
        ``offload_to_cpu`` puts them into the CPU's memory meanwhile. ``with_grads``, between backward and step, puts
        the whole reduced gradients into ``p.grad`` meanwhile; what is written to them is what the step takes, if
        ``writeback``.

        Example:
            >>> import shardrt, torch
            >>> rt = shardrt.Runtime()
            >>> model, opt = rt.shard(torch.nn.Linear(2, 2), torch.optim.SGD, lr=0.1)
            >>> with rt.summon_full_params(model):
            ...     tuple(model.weight.shape)
            (2, 2)
        """
        self._check_open()
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"rt.summon_full_params takes a torch.nn.Module, got {module!r}")
        wanted = set(module.parameters(recurse=recurse))
        with self._summoned(
            wanted,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        ):
            yield

    @contextmanager
    def _summoned(
        self,
        wanted: set[torch.nn.Parameter],
        *,
        writeback: bool,
        rank0_only: bool,
        offload_to_cpu: bool,
        with_grads: bool = False,
    ) -> Iterator[None]:
        if rank0_only and writeback:
            raise ConfigError(
                "summon_full_params cannot write back what one rank alone has; pass writeback=False with rank0_only"
            )
        if with_grads and (rank0_only or offload_to_cpu):
            raise ConfigError(
                "summon_full_params lends gradients to all ranks, where the parameters are; pass with_grads without "
                "rank0_only and offload_to_cpu"
            )
        optimizers = [made for made in self.living_optimizers() if isinstance(made, ShardedOptimizer)]
        with ExitStack() as stack:
            for optimizer in optimizers:
                if wanted & optimizer.trained():
                    optimizer.finish()
                    gradients = SummonedGradients(optimizer, wanted, writeback=writeback) if with_grads else None
                    summon = summoned(
                        optimizer.engine.every_buffers(),
                        wanted,
                        optimizer.engine.gathers_with,
                        lends=not rank0_only or self.rank == 0,
                        writeback=writeback,
                        offload_to_cpu=offload_to_cpu,
                    )
                    if writeback:
                        stack.callback(optimizer.spread_parameters)
                    followers = optimizer.followers
                    stack.callback(setattr, followers, "summoned", followers.summoned)
                    followers.summoned = True
                    if gradients is not None:
                        stack.callback(gradients.restore)
                    stack.enter_context(summon)
                    if gradients is not None:
                        stack.enter_context(gradients.lent())
            yield

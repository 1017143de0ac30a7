"""torch's FullyShardedDataParallel, translated onto the runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from shardrt.compat import fsdp_state
from shardrt.compat.fsdp_optimizers import OptimizerStates, roots_of
from shardrt.compat.sharded_tree import STRATEGIES, ShardedTree, TreeSettings, hybrid_groups, inner_units
from shardrt.errors import ConfigError, UnsupportedError
from shardrt.sharding.prefetching import Prefetch, prefetch_from
from shardrt.state.kinds import StateKind
from shardrt.state.optimizers import plain_name

_PREFIX = "_fsdp_wrapped_module"
_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}
_UNLIMITED = 1 << 30


class FullyShardedDataParallel(OptimizerStates):
    """Takes what ``torch.distributed.fsdp.FullyShardedDataParallel`` takes, and does what it documents, on any device.

    The module is sharded when something is first asked of it. From then on its parameters are this rank's parts, with
    the names of the whole ones (as with ``use_orig_params=True``, which makes no difference here), for any elementwise
    optimizer of torch's. ``torch.nn.utils.clip_grad_norm_`` and ``torch.amp.GradScaler`` see all ranks' parts.

    Example:
        >>> import torch
        >>> from shardrt.compat import FullyShardedDataParallel as FSDP
        >>> model = FSDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)))
        >>> opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> norm = model.clip_grad_norm_(1.0)
        >>> opt.step()
        >>> sorted(model.state_dict())
        ['0.bias', '0.weight', '1.bias', '1.weight']
    """

    def __init__(
        self,
        module: torch.nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[torch.nn.Module] | None = None,
        param_init_fn: Callable[[torch.nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[Any] | None = None,
        device_mesh: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module) or isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            raise ConfigError(
                f"FullyShardedDataParallel wraps a module that has a forward, got {type(module).__name__}"
            )
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        if not isinstance(strategy, ShardingStrategy):
            raise ConfigError(f"sharding_strategy={strategy!r} is not possible; give a member of ShardingStrategy")
        if ignored_modules is not None and ignored_states is not None:
            raise ConfigError("pass ignored_modules or ignored_states, not both")
        states = list(ignored_states or ())
        backward = prefetch_from(backward_prefetch).backward
        device = _device(device_id)
        group, mesh = hybrid_groups(process_group, device_mesh)
        self._tree: ShardedTree | None = None
        self._is_being_sharded = False
        self._outer: FullyShardedDataParallel | None = None
        self._kind = StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())
        self._settings = TreeSettings(
            strategy=strategy.name,
            process_group=group,
            mesh=mesh if STRATEGIES[strategy.name][0].shares == "host" else None,
            units=auto_wrap_policy if auto_wrap_policy is not None else (),
            mixed_precision=mixed_precision,
            offload=cpu_offload,
            prefetch=Prefetch(
                backward=backward, forward=forward_prefetch, limit=1 if limit_all_gathers else _UNLIMITED
            ),
            param_init_fn=param_init_fn,
            # Parts of different models would be a model that no rank has: values are always rank 0's.
            sync_module_states=True,
            ignored_modules=(*(ignored_modules or ()), *(m for m in states if isinstance(m, torch.nn.Module))),
            ignored_parameters=tuple(p for p in states if isinstance(p, torch.nn.Parameter)),
            device=None if device is None else device.type,
        )
        del use_orig_params, sync_module_states
        if device is not None:
            _move(module, device, self._settings)
        self._fsdp_wrapped_module = module
        for inner in self._inner():
            if inner._tree is not None:
                raise ConfigError(
                    "a FullyShardedDataParallel inside this module was used before, and is sharded by itself; wrap "
                    "everything first, the whole last, and use it then"
                )
            object.__setattr__(inner, "_outer", self)  # not as a child: it is the parent

    def _inner(self) -> list[FullyShardedDataParallel]:
        return [one for one in self.modules() if one is not self and isinstance(one, FullyShardedDataParallel)]

    def check_is_root(self) -> bool:
        """Whether this wrapper is inside no other."""
        return self._outer is None

    @property
    def sharded_tree(self) -> ShardedTree:
        """What it is sharded as; made when it is first asked for."""
        if self._outer is not None:
            return self._outer.sharded_tree
        if self._tree is None:
            self._is_being_sharded = True
            settings = self._settings
            inner = self._inner()
            for one in inner:
                _check_alike(settings, one._settings)
            units = inner_units(settings.units, [one._fsdp_wrapped_module for one in inner])
            try:
                together = [settings, *(one._settings for one in inner)]
                self._tree = ShardedTree(
                    self._fsdp_wrapped_module,
                    attrs.evolve(
                        settings,
                        units=units,
                        ignored_modules=tuple(m for one in together for m in one.ignored_modules),
                        ignored_parameters=tuple(p for one in together for p in one.ignored_parameters),
                    ),
                )
            finally:
                self._is_being_sharded = False
        return self._tree

    @property
    def module(self) -> torch.nn.Module:
        """The module that is wrapped."""
        return self._fsdp_wrapped_module

    def __getattr__(self, name: str) -> Any:
        """What the wrapper does not have, the module inside has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == _PREFIX:
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: int) -> Any:
        """Items of a module inside that has some."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the module inside."""
        _ = self.sharded_tree
        return self._fsdp_wrapped_module(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parts, by the names of the whole parameters."""
        if not self._root()._is_being_sharded:
            _ = self.sharded_tree
        for name, param in super().named_parameters(prefix, recurse, remove_duplicate):
            yield plain_name(name), param

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers, by their names without the wrapper's part."""
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield plain_name(name), buffer

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> FullyShardedDataParallel:
        """Call a function on every module, with whole parameters that it may change."""
        with self.sharded_tree.summoned(self._fsdp_wrapped_module):
            self._fsdp_wrapped_module.apply(fn)
        return self

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside this block only accumulates, whole gradients on each rank."""
        with self.sharded_tree.no_sync():
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip by the norm of the whole model's gradient; every rank calls it."""
        return torch.nn.utils.clip_grad_norm_(list(self.parameters()), max_norm, norm_type)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The state in the form that :meth:`set_state_dict_type` has set, by default the whole; every rank calls it.

        With ``keep_vars``: the parameters themselves, which are this rank's parts.
        """
        del args
        if keep_vars:
            inner = self._fsdp_wrapped_module
            self.sharded_tree  # noqa: B018  # sharded at first use
            return inner.state_dict(destination=destination, prefix=prefix, keep_vars=True)
        made = fsdp_state.model_state_dict(self.sharded_tree, self._fsdp_wrapped_module, self._root()._kind)
        if destination is None:
            return {prefix + name: value for name, value in made.items()}
        destination.update({prefix + name: value for name, value in made.items()})
        return destination

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Take over a state of any form; every rank calls it."""
        if assign:
            raise UnsupportedError("load_state_dict(assign=True): values are copied into parts here; leave assign out")
        return fsdp_state.load_model(self.sharded_tree, self._fsdp_wrapped_module, state_dict, strict=strict)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Refused: how gradients travel is the backend's business."""
        raise UnsupportedError(
            "communication hooks are not called for sharded gradients; compress with mixed_precision's reduce_dtype, "
            "or write a backend plugin (docs/writing-a-plugin.md)"
        )

    def _root(self) -> FullyShardedDataParallel:
        return self if self._outer is None else self._outer._root()

    @staticmethod
    def fsdp_modules(module: torch.nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in a module; with ``root_only`` those inside no other."""
        found = [one for one in module.modules() if isinstance(one, FullyShardedDataParallel)]
        return [one for one in found if one.check_is_root() or not root_only]

    @staticmethod
    def set_state_dict_type(
        module: torch.nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """From now on state dicts of the wrappers in a module have this form; returns the form before."""
        kinds = _CONFIGS[state_dict_type]
        config = state_dict_config or kinds[0]()
        for_optimizers = optim_state_dict_config or kinds[1]()
        if type(config) is not kinds[0] or type(for_optimizers) is not kinds[1]:
            raise ConfigError(
                f"{state_dict_type.name} goes with {kinds[0].__name__} and {kinds[1].__name__}, got "
                f"{type(config).__name__} and {type(for_optimizers).__name__}"
            )
        for given in (config, for_optimizers):
            StateKind.read(state_dict_type, given)
        roots = roots_of(module)
        before: StateDictSettings = roots[0]._kind
        for root in roots:
            root._kind = StateDictSettings(state_dict_type, config, for_optimizers)
        return before

    @staticmethod
    def get_state_dict_type(module: torch.nn.Module) -> StateDictSettings:
        """The form that state dicts have."""
        found: StateDictSettings = roots_of(module)[0]._kind
        return found

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: torch.nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """A block in which state dicts have this form."""
        before = FullyShardedDataParallel.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for root in roots_of(module):
                root._kind = before

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: torch.nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """A block in which the wrappers in a module have whole parameters; every rank enters it."""
        if with_grads and (rank0_only or offload_to_cpu):
            raise ConfigError("with_grads goes with neither rank0_only nor offload_to_cpu; leave these out")
        with ExitStack() as stack:
            for one in roots_of(module):
                inner = (module if isinstance(module, FullyShardedDataParallel) else one)._fsdp_wrapped_module
                stack.enter_context(
                    one.sharded_tree.summoned(
                        inner,
                        recurse=recurse,
                        writeback=writeback,
                        rank0_only=rank0_only,
                        offload_to_cpu=offload_to_cpu,
                        with_grads=with_grads,
                    )
                )
            yield


def _device(given: int | torch.device | str | None) -> torch.device | None:
    """A number is of the machine's kind of accelerator; where there is none, all there is is the CPU."""
    if given is None or (isinstance(given, int) and not torch.accelerator.is_available()):
        return None
    return torch.device(given)


def _move(module: torch.nn.Module, device: torch.device, settings: TreeSettings) -> None:
    """Bring what is in the CPU's memory to the device, except what is ignored."""
    ignored = {inner for given in settings.ignored_modules for inner in given.modules()}
    with torch.no_grad():
        for inner in module.modules():
            for tensor in (*inner._parameters.values(), *inner._buffers.values()):
                if tensor is None or inner in ignored or any(tensor is one for one in settings.ignored_parameters):
                    continue
                if tensor.device.type == "cpu" and device.type != "cpu":
                    moved = tensor.detach().to(device)
                    if isinstance(tensor, torch.nn.Parameter):
                        moved = torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
                    vars(moved).update(vars(tensor))
                    torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call] # the same object for all


_ALIKE = ("strategy", "process_group", "mesh", "mixed_precision", "offload", "prefetch", "param_init_fn")


def _check_alike(outer: TreeSettings, inner: TreeSettings) -> None:
    if inner.units != ():
        raise ConfigError(
            "an inner FullyShardedDataParallel has an auto_wrap_policy of its own; give it to the outer one"
        )
    for name in _ALIKE:
        mine, other = getattr(outer, name), getattr(inner, name)
        if mine != other:
            raise ConfigError(
                f"an inner FullyShardedDataParallel was made with {name}={other!r}, the outer one with {mine!r}; units "
                "of one model are sharded alike: pass the same to all"
            )

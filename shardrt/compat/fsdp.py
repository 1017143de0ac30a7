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
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from shardrt.compat import fsdp_state
from shardrt.compat.sharded_tree import STRATEGIES, ShardedTree, TreeSettings, hybrid_groups, inner_units
from shardrt.errors import ConfigError, UnsupportedError
from shardrt.sharding.prefetching import Prefetch, prefetch_from
from shardrt.state.optimizers import plain_name

_PREFIX = "_fsdp_wrapped_module"
_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}
_UNLIMITED = 1 << 30


class FullyShardedDataParallel(torch.nn.Module):
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
            device=_device(device_id),
        )
        del use_orig_params, sync_module_states
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
                self._tree = ShardedTree(self._fsdp_wrapped_module, attrs.evolve(settings, units=units))
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

    def check_is_root(self) -> bool:
        """Whether this wrapper is inside no other."""
        return self._outer is None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside this block only accumulates, whole gradients on each rank."""
        with self.sharded_tree.no_sync():
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip by the norm of the whole model's gradient; every rank calls it."""
        return torch.nn.utils.clip_grad_norm_(list(self.parameters()), max_norm, norm_type)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The state in the form that :meth:`set_state_dict_type` has set, by default the whole; every rank calls it."""
        del args, keep_vars
        made = fsdp_state.model_state_dict(self.sharded_tree, self._fsdp_wrapped_module, self._root()._kind)
        if destination is None:
            return {prefix + name: value for name, value in made.items()}
        destination.update({prefix + name: value for name, value in made.items()})
        return destination

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Take over a state of any form; every rank calls it."""
        del assign
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
        roots = _roots(module)
        before = roots[0]._kind
        for root in roots:
            root._kind = StateDictSettings(state_dict_type, config, for_optimizers)
        return before

    @staticmethod
    def get_state_dict_type(module: torch.nn.Module) -> StateDictSettings:
        """The form that state dicts have."""
        return _roots(module)[0]._kind

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
            for root in _roots(module):
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
        options: dict[str, Any] = {"with_grads": True} if with_grads else {}
        with ExitStack() as stack:
            for one in _roots(module):
                inner = module if one._outer is not None else one._fsdp_wrapped_module
                stack.enter_context(
                    one.sharded_tree.summoned(
                        inner,
                        recurse=recurse,
                        writeback=writeback,
                        rank0_only=rank0_only,
                        offload_to_cpu=offload_to_cpu,
                        **options,
                    )
                )
            yield

    @staticmethod
    def optim_state_dict(
        model: torch.nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """An optimizer's state in the form that is set, by the names of the parameters; every rank calls it."""
        del group
        if optim_state_dict is not None:
            raise UnsupportedError("optim_state_dict= of another optimizer cannot be transformed; pass the optimizer")
        root = _roots(model)[0]
        return fsdp_state.optimizer_state_dict(root.sharded_tree, optim, root._kind)

    @staticmethod
    def optim_state_dict_to_load(
        model: torch.nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """This rank's part of a state that :meth:`optim_state_dict` made, for ``optim.load_state_dict``."""
        del is_named_optimizer, group
        made = fsdp_state.state_to_load(_roots(model)[0].sharded_tree, optim, optim_state_dict)
        if load_directly:
            optim.load_state_dict(made)
        return made

    @staticmethod
    def full_optim_state_dict(
        model: torch.nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """The whole state by the names of the parameters, by default on rank 0 alone."""
        del optim_input, group
        kind = StateDictSettings(
            StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=rank0_only)
        )
        return fsdp_state.optimizer_state_dict(_roots(model)[0].sharded_tree, optim, kind)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: torch.nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Each rank's part of a state that rank 0 has, for ``optim.load_state_dict``."""
        del optim_input, group
        return fsdp_state.scattered_state(_roots(model)[0].sharded_tree, _given(optim), full_optim_state_dict)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: torch.nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """This rank's part of a whole state, for ``optim.load_state_dict``."""
        del optim_input
        return fsdp_state.state_to_load(_roots(model)[0].sharded_tree, _given(optim), full_optim_state_dict)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: torch.nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """A whole state by names from one by numbers, or the other way round."""
        del optim_input, optim
        names = [plain_name(name) for name, _ in model.named_parameters()]
        return fsdp_state.rekeyed(optim_state_dict, names, by_name=optim_state_key_type is OptimStateKeyType.PARAM_NAME)


def _roots(module: torch.nn.Module) -> list[FullyShardedDataParallel]:
    """The outermost wrappers in a module; where it is inside one, that."""
    found = FullyShardedDataParallel.fsdp_modules(module, root_only=True)
    if not found and isinstance(module, FullyShardedDataParallel):
        return [module._root()]
    if not found:
        raise ConfigError(
            f"there is no FullyShardedDataParallel in this {type(module).__name__}; pass what it returned"
        )
    return found


def _given(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    if optimizer is None:
        raise ConfigError("pass optim=, the optimizer that is to load the state; optim_input alone does not tell")
    return optimizer


def _device(given: int | torch.device | str | None) -> str | None:
    if given is None or isinstance(given, int):
        return None
    return torch.device(given).type


_ALIKE = ("strategy", "process_group", "mesh", "mixed_precision", "offload")


def _check_alike(outer: TreeSettings, inner: TreeSettings) -> None:
    for name in _ALIKE:
        mine, other = getattr(outer, name), getattr(inner, name)
        if mine != other:
            raise ConfigError(
                f"an inner FullyShardedDataParallel was made with {name}={other!r}, the outer one with {mine!r}; units "
                "of one model are sharded alike: pass the same to all"
            )

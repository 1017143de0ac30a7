"""The optimizer states of torch's FullyShardedDataParallel: its static methods, on any elementwise optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)

from shardrt.compat import fsdp_state
from shardrt.compat.sharded_tree import ShardedTree, TreeSettings
from shardrt.errors import ConfigError, UnsupportedError
from shardrt.state.optimizers import plain_name


class OptimizerStates(torch.nn.Module):
    """The part of :class:`shardrt.compat.FullyShardedDataParallel` that is about optimizers."""

    _kind: StateDictSettings
    _settings: TreeSettings

    def check_is_root(self) -> bool:
        """Whether this wrapper is inside no other."""
        raise NotImplementedError

    def _root(self) -> Any:
        raise NotImplementedError

    @property
    def sharded_tree(self) -> ShardedTree:
        """What it is sharded as."""
        raise NotImplementedError

    @staticmethod
    def optim_state_dict(
        model: torch.nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """An optimizer's state in the form that is set, by the names of the parameters; every rank calls it."""
        _check_group(model, group)
        if optim_state_dict is not None:
            raise UnsupportedError("optim_state_dict= of another optimizer cannot be transformed; pass the optimizer")
        root = roots_of(model)[0]
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
        _check_group(model, group)
        if is_named_optimizer:
            raise UnsupportedError("is_named_optimizer=True is not possible; load into one of torch.optim's classes")
        made = fsdp_state.state_to_load(roots_of(model)[0].sharded_tree, optim, optim_state_dict)
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
        del optim_input
        _check_group(model, group)
        kind = StateDictSettings(
            StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=rank0_only)
        )
        return fsdp_state.optimizer_state_dict(roots_of(model)[0].sharded_tree, optim, kind)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: torch.nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Each rank's part of a state that rank 0 has, for ``optim.load_state_dict``."""
        del optim_input
        _check_group(model, group)
        return fsdp_state.scattered_state(roots_of(model)[0].sharded_tree, _given(optim), full_optim_state_dict)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: torch.nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """This rank's part of a whole state, for ``optim.load_state_dict``."""
        del optim_input
        return fsdp_state.state_to_load(roots_of(model)[0].sharded_tree, _given(optim), full_optim_state_dict)

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

    @staticmethod
    def sharded_optim_state_dict(
        model: torch.nn.Module, optim: torch.optim.Optimizer, group: Any = None
    ) -> dict[str, Any]:
        """This rank's part of the state, which says what it is a part of."""
        _check_group(model, group)
        kind = StateDictSettings(
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        )
        return fsdp_state.optimizer_state_dict(roots_of(model)[0].sharded_tree, optim, kind)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: torch.nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """This rank's part, for ``optim.load_state_dict``, of what :meth:`sharded_optim_state_dict` made on all."""
        return fsdp_state.state_to_load(roots_of(model)[0].sharded_tree, optim, sharded_optim_state_dict)


def roots_of(module: torch.nn.Module) -> list[Any]:
    """The outermost wrappers in a module; where it is inside one, that."""
    found = [one for one in module.modules() if isinstance(one, OptimizerStates) and one.check_is_root()]
    if not found and isinstance(module, OptimizerStates):
        return [module._root()]
    if not found:
        raise ConfigError(
            f"there is no FullyShardedDataParallel in this {type(module).__name__}; pass what it returned"
        )
    return found


def _check_group(model: torch.nn.Module, group: Any) -> None:
    """State is gathered among the ranks that share it, whoever else there is."""
    own = roots_of(model)[0]._settings.process_group
    if group is not None and group is not (own or dist.group.WORLD):
        raise UnsupportedError("group= is not the process group that the module was wrapped with; leave it out")


def _given(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    if optimizer is None:
        raise ConfigError("pass optim=, the optimizer that is to load the state; optim_input alone does not tell")
    return optimizer

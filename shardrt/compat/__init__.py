"""torch's names for a sharded optimizer, with torch's signatures, on this runtime: changing an import is the migration.

Example:
    >>> import torch
    >>> from shardrt.compat import ZeroRedundancyOptimizer
    >>> model = torch.nn.Linear(4, 2)
    >>> opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> opt.step()
"""

from __future__ import annotations

from shardrt.compat.checkpoint_state import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from shardrt.compat.fsdp import FullyShardedDataParallel
from shardrt.compat.fsdp_module import FSDPModule, UnshardHandle
from shardrt.compat.fully_sharding import fully_shard, register_fsdp_forward_method, share_comm_ctx
from shardrt.compat.hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from shardrt.compat.zero import ZeroRedundancyOptimizer

__all__ = [
    "FSDPModule",
    "FullyShardedDataParallel",
    "UnshardHandle",
    "ZeroRedundancyOptimizer",
    "fully_shard",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "register_fsdp_forward_method",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "share_comm_ctx",
]

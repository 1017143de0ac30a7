"""What the server of the kill series has done before it forks: everything that would take each run a second.

Optimizers and the compiler they ask for are imported by the first step, plugins by the first look at them.
"""

from __future__ import annotations

import torch

import shardrt
import tests.ranks.kill_series

_weight = torch.nn.Parameter(torch.ones(1))
_weight.grad = torch.ones(1)
torch.optim.AdamW([_weight]).step()
shardrt.load_registry()

__all__ = ["tests"]

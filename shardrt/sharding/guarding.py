"""What a sharded module does otherwise than before: it cannot be pickled, and where its parameters are sharded neither
copied nor moved to another dtype or device; and ``zero_grad`` finds gradients that are in shards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardrt.errors import UnsupportedError
from shardrt.optim.sharded import ShardedOptimizer
from shardrt.sharding.units import Unit


def guard(root: torch.nn.Module, away: Sequence[Unit], zeroed: ShardedOptimizer | None) -> None:
    """``away`` are units whose parameters come and go, ``zeroed`` is the optimizer that keeps gradients for itself."""
    for module in {root, *(unit.module for unit in away)}:
        # In front of all else that a module has: whoever copies it is to meet this first.
        everything = dict(vars(module))
        vars(module).clear()
        vars(module).update({"_shardrt_guard": _Guard(copies=not away)}, **everything)
    for unit in away:
        vars(unit.module)["_apply"] = _applying(unit)
    if zeroed is not None:
        vars(root)["zero_grad"] = _Zeroing(root, zeroed)


class _Guard:
    """Whoever copies or pickles a module comes to what it holds."""

    def __init__(self, *, copies: bool) -> None:
        self._copies = copies

    def __deepcopy__(self, memo: Any) -> Any:
        return _Guard(copies=True) if self._copies else self._refuse("copied")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse("pickled")

    def _refuse(self, what: str) -> None:
        raise UnsupportedError(
            f"a sharded module cannot be {what}: each rank has a part of it, and its hooks belong to this one; call "
            "model.state_dict() on every rank and load what it returns into a module that is built anew"
        )


class _Zeroing:
    """``model.zero_grad()`` where gradients are not in ``p.grad``, but in the optimizer's shards."""

    def __init__(self, module: torch.nn.Module, optimizer: ShardedOptimizer | None) -> None:
        self._module = module
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def __call__(self, set_to_none: bool = True) -> None:
        type(self._module).zero_grad(self._module, set_to_none)
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None:
            optimizer.zero_grad(set_to_none)

    def __deepcopy__(self, memo: Any) -> _Zeroing:
        return _Zeroing(memo.get(id(self._module), self._module), None)  # a copy has gradients of its own only


def _applying(unit: Unit) -> Callable[..., torch.nn.Module]:
    """What ``to``, ``half``, ``cuda`` and the like call: fine where nothing changes, as trainers call it to be sure."""

    def apply(change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:
        module = unit.module
        for name, param in module.named_parameters(recurse=recurse):
            probe = torch.empty(0, dtype=param.dtype, device=param.device)
            changed = change(probe)
            if (changed.dtype, changed.device) != (param.dtype, param.device) or changed.is_shared():  # type: ignore[no-untyped-call]
                where = "in shared memory" if changed.is_shared() else f"on {changed.device}"  # type: ignore[no-untyped-call]
                raise UnsupportedError(
                    f"parameter {name!r} of a sharded module cannot become {changed.dtype} {where}: its values are "
                    "divided among the ranks; call .to(...) before it is sharded, or shard it with "
                    "mixed precision"
                )
        for inner in module.modules() if recurse else [module]:
            for name, buffer in inner._buffers.items():
                if buffer is not None:
                    inner._buffers[name] = change(buffer)
        return module

    return apply

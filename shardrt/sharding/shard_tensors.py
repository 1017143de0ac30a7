"""This rank's part of a parameter and of its gradient, as tensors that any optimizer of torch's can step.

Note [Norms of parts]: code written for whole gradients takes the norm of each and then the norm of those
(``torch.nn.utils.clip_grad_norm_`` does). Of parts that would be another number on every rank, and nobody would notice.
So norms of :class:`ShardGradient` are :class:`PartNorm`, and the norm over several of these is formed over all ranks.
GradScaler's search for infinities is made over all ranks for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from shardrt.protocols import Communicator

_NORMS = (torch.linalg.vector_norm, torch.norm, torch.Tensor.norm, torch._foreach_norm)
_KEEPS_NORMS = (torch.stack, torch.cat, torch.Tensor.to, torch.Tensor.detach, torch.Tensor.float)
_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_


@attrs.frozen(kw_only=True, eq=False)
class Peers:
    """The ranks that have parts of the same parameters."""

    everybody: Communicator
    shared: Communicator
    """Those that have one copy of each between them."""
    replica_count: int = 1
    """How many ranks have each part."""

    def total_norm(self, local: torch.Tensor, order: float) -> torch.Tensor:
        """From the norm of this rank's parts the norm over all, the same bits on every rank."""
        with torch.no_grad():
            found = local.reshape(1).to(torch.float32, copy=True)
            if math.isinf(order):
                self.everybody.all_reduce(found, op="max").wait()
                return found[0].to(local.dtype)
            powered = found.pow(order) / self.replica_count
            self.everybody.all_reduce(powered).wait()
            return powered.pow(1.0 / order)[0].to(local.dtype)


class ShardParameter(torch.nn.Parameter):
    """This rank's part of a parameter. It has as many dims as the whole, all but the last of size 1 where it is cut.

    Example:
        >>> import torch
        >>> from shardrt.sharding.shard_tensors import ShardParameter
        >>> part = ShardParameter(torch.zeros(1, 3), requires_grad=True)
        >>> part.ndim, part.to_local().requires_grad
        (2, False)
    """

    _whole: Callable[[], torch.Tensor]

    def to_local(self) -> torch.Tensor:
        """The part as a plain tensor."""
        return self.detach().as_subclass(torch.Tensor)

    def full_tensor(self) -> torch.Tensor:
        """The whole parameter, gathered; every rank calls it."""
        return self._whole()


class ShardGradient(torch.Tensor):
    """This rank's part of a reduced gradient. See Note [Norms of parts]."""

    peers: Peers

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute as on plain tensors; norms say that they are of parts."""
        kwargs = kwargs or {}
        if func in _NORMS and not _along_dims(args, kwargs):
            return _part_norms(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func is _UNSCALE:
            found = args[1].reshape(1)
            _peers_in(args).everybody.all_reduce(found, op="max").wait()
        return result


class PartNorm(torch.Tensor):
    """The norm of this rank's part of something, or several such norms in one tensor."""

    peers: Peers

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The norm over several is formed over all ranks; anything else is computed with the numbers as they are."""
        kwargs = kwargs or {}
        peers = _peers_in((args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func in _NORMS and not _along_dims(args, kwargs) and isinstance(args[0], PartNorm) and args[0].ndim:
            return peers.total_norm(result.as_subclass(torch.Tensor), _order(args, kwargs))
        return marked(result, PartNorm, peers) if func in _KEEPS_NORMS else result


def marked(tensor: torch.Tensor, kind: type[Any], peers: Peers) -> Any:
    """The same memory as a tensor of one of these kinds."""
    made = tensor.as_subclass(kind)
    made.peers = peers
    return made


def _peers_in(values: Any) -> Peers:
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, (ShardGradient, PartNorm)):
            return leaf.peers
    raise AssertionError("called with none of our tensors")


def _order(args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    given = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2.0))
    return 2.0 if given is None or given == "fro" else float(given)


def _along_dims(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return len(args) > 2 or kwargs.get("dim") is not None


def _part_norms(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    order, peers = _order(args, kwargs), _peers_in(args)

    def norm_of(tensor: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = tensor.as_subclass(torch.Tensor)
            # Nothing has no largest element, and the norm 0.
            found = torch.linalg.vector_norm(plain, order) if plain.numel() else plain.new_zeros(())
            return marked(found, PartNorm, peers)

    return [norm_of(one) for one in args[0]] if func is torch._foreach_norm else norm_of(args[0])
